// Arithmetic with one rounding stated per call, the same bits in host and device code.
#pragma once

#include "hbmoff/core/host_device.hpp"

// A compiler that may reorder, contract or approximate floating-point operations cannot keep "where an update runs
// never changes a bit": refused here, in every translation unit that would compile the arithmetic. clang tells of
// -fassociative-math, -freciprocal-math and -funsafe-math-optimizations through no macro, but takes them back by a
// pragma, in every header that computes.
#if defined(__FAST_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__ASSOCIATIVE_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || defined(_M_FP_FAST)
#error \
    "hbmoff: its arithmetic is exact and cannot be compiled with -ffast-math or a part of it: compile this file without"
#endif

#ifdef __clang__
#pragma float_control(precise, on, push)
#endif

namespace hbmoff::math {

// Always inline, so that a caller compiled for a processor with an fma instruction gets that instruction, and one
// compiled without gets the C library's exact fma. Device code says its instruction in PTX, because -use_fast_math
// changes operators, builtins and even `__fmaf_rn`: it would flush denormals and approximate.

/// a * b + c, rounded once.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
#else
  return __builtin_fmaf(a, b, c);
#endif
}
/// a * b + c, rounded once.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline double fma(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  double result;
  asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(result) : "d"(a), "d"(b), "d"(c));
  return result;
#else
  return __builtin_fma(a, b, c);
#endif
}

/// a * b, rounded once, whatever the result feeds: a bare product that feeds an addition is contracted with it by some
/// compilers and not by others. Adding -0 changes no product, not even a zero's sign.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float mul(float a, float b) { return fma(a, b, -0.0f); }

/// -a: the sign alone changes.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float negate(float a) {
#ifdef __CUDA_ARCH__
  float result;
  asm("neg.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#else
  return -a;
#endif
}

/// a / b as IEEE 754 has it.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float div(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a / b;
#endif
}
/// a / b as IEEE 754 has it.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline double div(double a, double b) {
#ifdef __CUDA_ARCH__
  double result;
  asm("div.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(a), "d"(b));
  return result;
#else
  return a / b;
#endif
}

/// The square root as IEEE 754 has it; a NaN below zero.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float sqrt(float a) {
#ifdef __CUDA_ARCH__
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#else
  return __builtin_sqrtf(a);
#endif
}
/// The square root as IEEE 754 has it; a NaN below zero.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline double sqrt(double a) {
#ifdef __CUDA_ARCH__
  double result;
  asm("sqrt.rn.f64 %0, %1;" : "=d"(result) : "d"(a));
  return result;
#else
  return __builtin_sqrt(a);
#endif
}

/// The same number, denormals included.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline double to_double(float a) {
#ifdef __CUDA_ARCH__
  double result;
  asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(a));
  return result;
#else
  return a;
#endif
}
/// The nearest float, ties to even, denormals included.
[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float to_float(double a) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(a));
  return result;
#else
  return static_cast<float>(a);
#endif
}

}  // namespace hbmoff::math

#ifdef __clang__
#pragma float_control(pop)
#endif
