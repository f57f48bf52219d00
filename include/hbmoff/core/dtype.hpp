// Element types of training state, and exact conversions between them.
#pragma once

#include <cstdint>
#include <string_view>

#include "hbmoff/core/host_device.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// `std::bit_cast`, also for device code.
template <class To, class From>
  requires(sizeof(To) == sizeof(From))
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline To bit_cast(const From& from) noexcept {
  return __builtin_bit_cast(To, from);
}

enum class DType : std::uint8_t { fp32, bf16, fp16 };

[[nodiscard]] constexpr Bytes size_of(DType dtype) { return Bytes{dtype == DType::fp32 ? 4u : 2u}; }

[[nodiscard]] constexpr std::string_view to_string(DType dtype) {
  return dtype == DType::fp32 ? "fp32" : dtype == DType::bf16 ? "bf16" : "fp16";
}

/// The one NaN hbmoff writes, so that bits compare on every path.
inline constexpr std::uint32_t canonical_nan_bits = 0x7fffffffu;
inline constexpr std::uint16_t canonical_nan_bits_16 = 0x7fffu;

// The functions below are always inline and free of branches, so that loops over them become vector code: compilers
// judge an inline function by its length, and a loop with a call or a jump stays scalar.
namespace dtype_detail {

/// `condition ? a : b` by a mask. Of the conditional operator g++ makes a branch.
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline std::uint32_t select(bool condition,
                                                                                           std::uint32_t a,
                                                                                           std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// a + b to nearest. In device code -use_fast_math would change a plain sum.
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline float add(float a, float b) {
#ifdef __CUDA_ARCH__
  float sum = 0;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
#else
  return a + b;
#endif
}

}  // namespace dtype_detail

/// `x`, every NaN replaced by 0x7fffffff. Works on bits: a test `x != x` is folded away by -ffast-math.
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline float canonical(float x) {
  const std::uint32_t bits = hbmoff::bit_cast<std::uint32_t>(x);
  return hbmoff::bit_cast<float>(dtype_detail::select((bits & 0x7fffffffu) > 0x7f800000u, canonical_nan_bits, bits));
}

/// `x`, every NaN replaced by 0x7fffffffffffffff.
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline double canonical(double x) {
  constexpr std::uint64_t magnitude = 0x7fffffffffffffffu;
  const std::uint64_t bits = hbmoff::bit_cast<std::uint64_t>(x);
  return (bits & magnitude) > 0x7ff0000000000000u ? hbmoff::bit_cast<double>(magnitude) : x;
}

/// bfloat16: the upper half of an fp32.
struct bf16 {
  std::uint16_t bits;
  friend constexpr bool operator==(bf16, bf16) = default;  ///< compares bits
};

/// IEEE binary16.
struct fp16 {
  std::uint16_t bits;
  friend constexpr bool operator==(fp16, fp16) = default;  ///< compares bits
};

[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline float to_float(float x) { return x; }

/// Exact.
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline float to_float(bf16 x) {
  return hbmoff::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// Exact, denormals included. No step takes or makes an fp32 denormal, so a flush-to-zero mode cannot change it.
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline float to_float(fp16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  const std::uint32_t shifted = magnitude << 13;
  // The exponent moves by 127 - 15; from infinity and NaN, by as much again.
  const std::uint32_t normal = shifted + (magnitude < 0x7c00u ? 112u << 23 : 224u << 23);
  // A denormal's mantissa is put behind the leading one of 2^-14, which is then taken off again: exact.
  constexpr std::uint32_t smallest_normal = 113u << 23;
  const float denormal =
      dtype_detail::add(hbmoff::bit_cast<float>(shifted + smallest_normal), -hbmoff::bit_cast<float>(smallest_normal));
  return hbmoff::bit_cast<float>(
      dtype_detail::select(magnitude < 0x400u, hbmoff::bit_cast<std::uint32_t>(denormal), normal) | sign);
}

template <class T>
[[nodiscard]] constexpr T from_float(float x) = delete;

template <>
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline float from_float<float>(float x) {
  return canonical(x);
}

/// Round to nearest, ties to even; NaN becomes 0x7fff.
template <>
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline bf16 from_float<bf16>(float x) {
  const std::uint32_t bits = hbmoff::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{canonical_nan_bits_16};
  return bf16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// Round to nearest, ties to even; overflow becomes infinity, NaN becomes 0x7fff.
template <>
[[nodiscard, gnu::always_inline]] HBMOFF_HOST_DEVICE constexpr inline fp16 from_float<fp16>(float x) {
  using dtype_detail::select;
  const std::uint32_t bits = hbmoff::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14: one unit of 0.5's mantissa is fp16's smallest denormal, so this addition does the rounding.
  const bool is_small = magnitude < 0x38800000u;
  const float rounded = dtype_detail::add(hbmoff::bit_cast<float>(select(is_small, magnitude, 0)), 0.5f);
  const std::uint32_t finite = select(is_small, hbmoff::bit_cast<std::uint32_t>(rounded) - 0x3f000000u, normal);
  const std::uint32_t bounded = select(magnitude >= 0x477ff000u, 0x7c00u, finite);  // 65520 and above
  return fp16{static_cast<std::uint16_t>(select(magnitude > 0x7f800000u, canonical_nan_bits_16, bounded | sign))};
}

/// The `DType` of an element type.
template <class T>
inline constexpr DType dtype_of = [] { static_assert(sizeof(T) == 0, "not an element type"); }();
template <>
inline constexpr DType dtype_of<float> = DType::fp32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<fp16> = DType::fp16;

}  // namespace hbmoff
