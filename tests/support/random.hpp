// Numbers for tests: the same ones with every standard library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>

namespace random_numbers {

/// The SplitMix64 generator. Two with the same state give the same numbers.
struct Random {
  std::uint64_t state;

  /// 64 random bits.
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// A float of either sign whose magnitude spreads over [2^low, 2^high).
  float spread(int low, int high) {
    const int exponent = low + static_cast<int>(next() % static_cast<unsigned>(high - low));
    const double x = std::ldexp(1 + uniform(), exponent);
    return static_cast<float>(next() & 1 ? x : -x);
  }
  /// Any bits at all: denormals, infinities and NaNs as well.
  float any() {
    const std::uint64_t r = next();
    if (r % 8 == 0) {
      constexpr std::uint32_t special[] = {0,           0x80000000u, 1,           0x80000001u,
                                           0x007fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu,
                                           0x7f800000u, 0xff800000u, 0x7f800001u, 0xffc00000u};
      return std::bit_cast<float>(special[(r >> 8) % std::size(special)]);
    }
    return std::bit_cast<float>(static_cast<std::uint32_t>(r >> 32));
  }
};

/// The first number of the generator that is at `x`: a hash.
[[nodiscard]] inline std::uint64_t hash(std::uint64_t x) { return Random{x}.next(); }

}  // namespace random_numbers
