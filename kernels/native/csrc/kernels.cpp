// All kernels for one instruction set, chosen by the compiler's flags; FT_ISA names it.
#include "attention.h"
#include "decoder.h"
#include "fused_ops.h"
#include "gemm_bf16.h"
#include "gemm_int8.h"

#define FT_CONCAT_(a, b) a##b
#define FT_CONCAT(a, b) FT_CONCAT_(a, b)
#define FT_QUOTE_(a) #a
#define FT_QUOTE(a) FT_QUOTE_(a)

namespace {

int32_t rms_norm(const FtRmsNorm* args) {
  return args->dtype == FT_BF16 ? rms_norm_rows<bf16>(*args) : rms_norm_rows<float>(*args);
}

int32_t rotary_store(const FtRotaryStore* args) {
  return args->dtype == FT_BF16 ? rotary_store_rows<bf16>(*args) : rotary_store_rows<float>(*args);
}

int32_t gated_mul(const FtGatedMul* args) {
  return args->dtype == FT_BF16 ? gated_mul_rows<bf16>(*args) : gated_mul_rows<float>(*args);
}

}  // namespace

#if !defined(FT_BF16_DOT)
#define pack_bf16 nullptr
#define linear_bf16 nullptr
#endif

extern const FtKernels FT_CONCAT(ft_kernels_, FT_ISA);
const FtKernels FT_CONCAT(ft_kernels_, FT_ISA) = {
    FT_QUOTE(FT_ISA), kTileVectors * kLanes, attention, rms_norm, rotary_store, gated_mul, linear_bf16, pack_bf16, linear_int8, pack_int8, decoder,
};
