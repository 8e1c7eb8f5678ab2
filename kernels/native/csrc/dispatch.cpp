// Entry points for Python: which builds of the kernels are in this library, and which of them this processor can run.
#include <cstdint>
#include <cstring>

#include "abi.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

#define FT_EXPORT extern "C" __attribute__((visibility("default")))

extern const FtKernels ft_kernels_portable;
#ifdef FT_HAS_avx2
extern const FtKernels ft_kernels_avx2;
#endif
#ifdef FT_HAS_avx512
extern const FtKernels ft_kernels_avx512;
#endif
#ifdef FT_HAS_avx512_vnni
extern const FtKernels ft_kernels_avx512_vnni;
#endif
#ifdef FT_HAS_avx512_bf16
extern const FtKernels ft_kernels_avx512_bf16;
#endif

namespace {

struct Features {
  bool avx2 = false, avx512 = false, vnni = false, bf16 = false;
};

// What processor and operating system offer together: registers that the system does not save are of no use.
Features detect() {
  Features features;
#if defined(__x86_64__) || defined(__i386__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return features;
  const bool has_fma = ecx >> 12 & 1, has_xsave = ecx >> 27 & 1, has_f16c = ecx >> 29 & 1;
  if (!has_xsave) return features;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool saves_ymm = (low & 0x6) == 0x6, saves_zmm = (low & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
  const unsigned max_subleaf = eax;
  features.avx2 = saves_ymm && has_fma && has_f16c && (ebx >> 5 & 1);
  const bool has_avx512 = (ebx >> 16 & 1) && (ebx >> 17 & 1) && (ebx >> 30 & 1) && (ebx >> 31 & 1);  // F, DQ, BW, VL
  features.avx512 = features.avx2 && saves_zmm && has_avx512;
  features.vnni = features.avx512 && (ecx >> 11 & 1);
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) features.bf16 = features.vnni && (eax >> 5 & 1);
#endif
  return features;
}

const FtKernels* find(const char* isa) {
  const Features features = detect();
  // best first
#ifdef FT_HAS_avx512_bf16
  if (features.bf16 && (!isa || !strcmp(isa, "avx512_bf16"))) return &ft_kernels_avx512_bf16;
#endif
#ifdef FT_HAS_avx512_vnni
  if (features.vnni && (!isa || !strcmp(isa, "avx512_vnni"))) return &ft_kernels_avx512_vnni;
#endif
#ifdef FT_HAS_avx512
  if (features.avx512 && (!isa || !strcmp(isa, "avx512"))) return &ft_kernels_avx512;
#endif
#ifdef FT_HAS_avx2
  if (features.avx2 && (!isa || !strcmp(isa, "avx2"))) return &ft_kernels_avx2;
#endif
  (void)features;
  return !isa || !strcmp(isa, "portable") ? &ft_kernels_portable : nullptr;
}

}  // namespace

// The build named `isa`, or without a name the best one that runs here; null if it does not.
FT_EXPORT const FtKernels* ft_find_kernels(const char* isa) { return find(isa); }
