// Byte counts as a type of their own, so that bytes and element counts cannot be swapped at a call.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace hbmoff {

/// A number of bytes, 64-bit. Explicit to construct: `Bytes{4096}`, `8_MiB`.
class Bytes {
 public:
  constexpr Bytes() = default;
  constexpr explicit Bytes(std::uint64_t count) : count_{count} {}

  [[nodiscard]] constexpr std::uint64_t count() const { return count_; }

  constexpr Bytes& operator+=(Bytes other) { return count_ += other.count_, *this; }
  constexpr Bytes& operator-=(Bytes other) { return count_ -= other.count_, *this; }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return a += b; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return a -= b; }
  friend constexpr Bytes operator*(Bytes a, std::uint64_t n) { return Bytes{a.count_ * n}; }
  friend constexpr Bytes operator*(std::uint64_t n, Bytes a) { return a * n; }
  /// How many whole `b` fit into `a`.
  friend constexpr std::uint64_t operator/(Bytes a, Bytes b) { return a.count_ / b.count_; }
  friend constexpr Bytes operator/(Bytes a, std::uint64_t n) { return Bytes{a.count_ / n}; }
  friend constexpr bool operator==(Bytes, Bytes) = default;
  friend constexpr auto operator<=>(Bytes, Bytes) = default;

 private:
  std::uint64_t count_ = 0;
};

inline namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return Bytes{n}; }
constexpr Bytes operator""_KiB(unsigned long long n) { return Bytes{n << 10}; }
constexpr Bytes operator""_MiB(unsigned long long n) { return Bytes{n << 20}; }
constexpr Bytes operator""_GiB(unsigned long long n) { return Bytes{n << 30}; }
constexpr Bytes operator""_TiB(unsigned long long n) { return Bytes{n << 40}; }
}  // namespace literals

/// `n` rounded up to a multiple of `unit` (`unit` > 0). The caller keeps `n + unit - 1` below 2^64.
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) {
  return (n + unit - 1) / unit * unit;
}
[[nodiscard]] constexpr Bytes round_up(Bytes n, Bytes unit) { return Bytes{round_up(n.count(), unit.count())}; }

/// For people: "512 bytes", "1.50 MiB". Binary units, two decimals, rounded down.
[[nodiscard]] inline std::string to_string(Bytes bytes) {
  constexpr const char* names[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes.count() < 1024) return std::to_string(bytes.count()) + " bytes";
  int unit = 0;
  std::uint64_t scale = 1024;
  while (unit < 5 && bytes.count() / scale >= 1024) scale *= 1024, ++unit;
  const std::uint64_t whole = bytes.count() / scale;
  // One decimal at a time: a remainder below 2^60 times 100 would not fit.
  const std::uint64_t tenths = bytes.count() % scale * 10;
  const std::uint64_t hundredths = tenths / scale * 10 + tenths % scale * 10 / scale;
  return std::to_string(whole) + (hundredths < 10 ? ".0" : ".") + std::to_string(hundredths) + " " + names[unit];
}

}  // namespace hbmoff
