// Tags for the instruction sets that host loops are compiled for, and which of them this machine runs.
#pragma once

namespace hbmoff {

/// What the translation unit is compiled for; runs everywhere.
struct ScalarIsa {};
/// x86-64 with AVX2 and FMA. Code for it is compiled in any x86-64 translation unit, by target attributes.
struct Avx2Isa {};

#if defined(__x86_64__) && defined(__GNUC__)
#define HBMOFF_HAS_AVX2_CODE 1
#else
#define HBMOFF_HAS_AVX2_CODE 0
#endif

[[nodiscard]] constexpr bool runs_here(ScalarIsa) { return true; }

/// Whether this process may run `Avx2Isa` loops: the processor and the operating system support them. Costs a load and
/// a comparison. False where no such code was compiled.
[[nodiscard]] inline bool runs_here(Avx2Isa) {
#if HBMOFF_HAS_AVX2_CODE
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

/// Which instruction set the host loops run with here: "avx2+fma" or "scalar". Scalar loops are ten times slower and more
/// where the translation unit's own target has no fma instruction; a trainer may want to say so.
[[nodiscard]] inline const char* host_isa_name() { return runs_here(Avx2Isa{}) ? "avx2+fma" : "scalar"; }

}  // namespace hbmoff
