// Element types of training state, and exact conversions between them.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "hbmoff/core/units.hpp"

namespace hbmoff {

enum class DType : std::uint8_t { fp32, bf16, fp16 };

[[nodiscard]] constexpr Bytes size_of(DType dtype) { return Bytes{dtype == DType::fp32 ? 4u : 2u}; }

[[nodiscard]] constexpr std::string_view to_string(DType dtype) {
  return dtype == DType::fp32 ? "fp32" : dtype == DType::bf16 ? "bf16" : "fp16";
}

/// The one NaN hbmoff writes, so that bits compare on every path.
inline constexpr std::uint32_t canonical_nan_bits = 0x7fffffffu;
inline constexpr std::uint16_t canonical_nan_bits_16 = 0x7fffu;

/// `x`, every NaN replaced by 0x7fffffff. Works on bits: a test `x != x` is folded away by -ffast-math.
[[nodiscard]] constexpr float canonical(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? std::bit_cast<float>(canonical_nan_bits) : x;
}

/// `x`, every NaN replaced by 0x7fffffffffffffff.
[[nodiscard]] constexpr double canonical(double x) {
  constexpr std::uint64_t magnitude = 0x7fffffffffffffffu;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  return (bits & magnitude) > 0x7ff0000000000000u ? std::bit_cast<double>(magnitude) : x;
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

[[nodiscard]] constexpr float to_float(float x) { return x; }

/// Exact.
[[nodiscard]] constexpr float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// Exact, denormals included; done on bits, so a flush-to-zero mode cannot change it.
[[nodiscard]] constexpr float to_float(fp16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    exponent = 1;
    while ((mantissa & 0x400u) == 0) mantissa <<= 1, --exponent;  // wraps below zero; the sum below is exact
    mantissa &= 0x3ffu;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

template <class T>
[[nodiscard]] constexpr T from_float(float x) = delete;

template <>
[[nodiscard]] constexpr float from_float<float>(float x) {
  return canonical(x);
}

/// Round to nearest, ties to even; NaN becomes 0x7fff.
template <>
[[nodiscard]] constexpr bf16 from_float<bf16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{canonical_nan_bits_16};
  return bf16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// Round to nearest, ties to even; overflow becomes infinity, NaN becomes 0x7fff.
template <>
[[nodiscard]] constexpr fp16 from_float<fp16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return fp16{canonical_nan_bits_16};
  if (magnitude >= 0x477ff000u) return fp16{static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and above
  if (magnitude >= 0x38800000u) {                                                     // normal in fp16
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return fp16{static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
  }
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return fp16{static_cast<std::uint16_t>(sign)};  // below half the smallest denormal
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const std::uint32_t shift = 126 - exponent;  // 14..24
  const std::uint32_t half = 1u << (shift - 1);
  const std::uint32_t rest = mantissa & ((1u << shift) - 1);
  std::uint32_t result = mantissa >> shift;
  if (rest > half || (rest == half && (result & 1u))) ++result;
  return fp16{static_cast<std::uint16_t>(sign | result)};
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
