// The floating-point environment that stream work runs in, whatever the process has set.
#pragma once

#include <cfenv>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hbmoff::detail {

/// While it lives, the calling thread keeps denormals and rounds to nearest; then the thread has its own modes back.
/// (A program linked with -ffast-math starts with denormals flushed, and its threads inherit that.) Exception masks
/// are left alone.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept : rounding_{std::fegetround()} {
    std::fesetround(FE_TONEAREST);
#if defined(__SSE2__)
    control_ = _mm_getcsr();
    constexpr std::uint32_t flush_results = 1u << 15, flush_operands = 1u << 6;
    _mm_setcsr(control_ & ~(flush_results | flush_operands));
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(control_));
    constexpr std::uint64_t flush = 1u << 24, flush_half = 1u << 19;
    asm volatile("msr fpcr, %0" : : "r"(control_ & ~(flush | flush_half)));
#endif
  }
  ~FloatEnvironment() {
#if defined(__SSE2__)
    _mm_setcsr(control_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(control_));
#endif
    std::fesetround(rounding_);
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  int rounding_;
#if defined(__SSE2__)
  std::uint32_t control_;
#elif defined(__aarch64__)
  std::uint64_t control_;
#endif
};

}  // namespace hbmoff::detail
