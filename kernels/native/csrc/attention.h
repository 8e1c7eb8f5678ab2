// Attention of one layer: the sequences with one new token, then those with several.
#pragma once
#include "attention_decode.h"
#include "attention_prefill.h"

namespace {

int32_t attention(const FtAttention* args) {
  const bool is_bf16 = args->dtype == FT_BF16;
  const int32_t status = is_bf16 ? attend_decodes<bf16>(*args) : attend_decodes<float>(*args);
  if (status != FT_OK) return status;
#if defined(FT_BF16_DOT)
  if (is_bf16) return attend_prefills<Pairs, bf16>(*args);
#else
  if (is_bf16) return attend_prefills<Floats, bf16>(*args);
#endif
  return attend_prefills<Floats, float>(*args);
}

}  // namespace
