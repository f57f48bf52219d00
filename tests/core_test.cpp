// Units, element types, tiers, tensor descriptions and errors.
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include <doctest/doctest.h>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/error.hpp"
#include "hbmoff/core/isa.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/core/version.hpp"

using namespace hbmoff;

namespace {

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

/// The value of 16 bits by the definition of the format, through ldexp; for finite values.
double value_of(std::uint16_t x, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (x >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = x & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return x & 0x8000u ? -magnitude : magnitude;
}

/// Checks every value of a 16-bit format, and the rounding of every fp32 number that decides between two neighbours.
template <class T>
void check_format(int exponent_bits, int mantissa_bits) {
  const std::uint16_t infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {
    const T x{static_cast<std::uint16_t>(pattern)};
    const auto magnitude = static_cast<std::uint16_t>(pattern & 0x7fffu);
    const float wide = to_float(x);
    if (magnitude > infinity) {  // NaN: any to any NaN, and back to the canonical one
      REQUIRE((bits(wide) & 0x7fffffffu) > 0x7f800000u);
      REQUIRE(from_float<T>(wide).bits == canonical_nan_bits_16);
      continue;
    }
    REQUIRE(from_float<T>(wide) == x);
    if (magnitude == infinity) {
      REQUIRE(std::isinf(wide));
      continue;
    }
    REQUIRE(static_cast<double>(wide) == value_of(x.bits, exponent_bits, mantissa_bits));
    REQUIRE(std::signbit(wide) == (pattern >= 0x8000u));

    // Halfway to the next value away from zero (past the largest: to where it would be) the even one wins. Halfway is an
    // fp32 number in both formats, denormals included.
    const double next =
        magnitude + 1 == infinity
            ? std::ldexp(1.0, 1 << (exponent_bits - 1))
            : std::abs(value_of(static_cast<std::uint16_t>(magnitude + 1), exponent_bits, mantissa_bits));
    const float half = std::copysign(static_cast<float>((std::abs(static_cast<double>(wide)) + next) / 2), wide);
    const T up{static_cast<std::uint16_t>(x.bits + 1)};
    const float away = std::copysign(std::numeric_limits<float>::infinity(), wide);
    REQUIRE(from_float<T>(half) == (x.bits % 2 == 0 ? x : up));
    REQUIRE(from_float<T>(std::nextafter(half, away)) == up);
    REQUIRE(from_float<T>(std::nextafter(half, 0.0f)) == x);
  }
  REQUIRE(from_float<T>(std::numeric_limits<float>::max()).bits == infinity);
  REQUIRE(from_float<T>(std::numeric_limits<float>::lowest()).bits == (infinity | 0x8000u));
  for (const std::uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffffffffu, 0x7f80ffffu}) {
    REQUIRE(from_float<T>(std::bit_cast<float>(nan)).bits == canonical_nan_bits_16);
  }
}

}  // namespace

TEST_CASE("Bytes") {
  CHECK(Bytes{}.count() == 0);
  CHECK(1_B == Bytes{1});
  CHECK(1_KiB == Bytes{1024});
  CHECK(3_MiB == Bytes{3u << 20});
  CHECK(5_GiB == Bytes{std::uint64_t{5} << 30});
  CHECK(2_TiB == Bytes{std::uint64_t{1} << 41});
  CHECK(1_KiB + 1_B == Bytes{1025});
  CHECK(1_KiB - 1_B == Bytes{1023});
  CHECK(3_KiB * 2 == 6_KiB);
  CHECK(2 * 3_KiB == 6_KiB);
  CHECK(7_KiB / 2_KiB == 3);
  CHECK(7_KiB / 2 == Bytes{3584});
  CHECK(1_KiB < 1_MiB);
  CHECK(1_MiB >= 1_MiB);
  Bytes sum = 1_KiB;
  sum += 1_KiB;
  sum -= 512_B;
  CHECK(sum == Bytes{1536});
  CHECK(Bytes{std::uint64_t{3} << 31} * 4 == 24_GiB);  // past 32 bits
  static_assert(!std::is_convertible_v<int, Bytes>);
  static_assert(!std::is_convertible_v<Bytes, std::uint64_t>);
}

TEST_CASE("round_up") {
  CHECK(round_up(0, 256) == 0);
  CHECK(round_up(1, 256) == 256);
  CHECK(round_up(256, 256) == 256);
  CHECK(round_up(257, 256) == 512);
  CHECK(round_up(10, 3) == 12);
  CHECK(round_up(Bytes{4097}, 4_KiB) == 8_KiB);
  CHECK(round_up(~std::uint64_t{0} - 255, 256) == ~std::uint64_t{0} - 255);
}

TEST_CASE("Bytes for people") {
  CHECK(to_string(Bytes{}) == "0 bytes");
  CHECK(to_string(Bytes{1023}) == "1023 bytes");
  CHECK(to_string(1_KiB) == "1.00 KiB");
  CHECK(to_string(Bytes{1536}) == "1.50 KiB");
  CHECK(to_string(Bytes{1035}) == "1.01 KiB");
  CHECK(to_string(Bytes{(1u << 20) - 1}) == "1023.99 KiB");  // rounded down, never into the next unit
  CHECK(to_string(1_MiB) == "1.00 MiB");
  CHECK(to_string(Bytes{(1u << 20) + 10485}) == "1.00 MiB");  // one hundredth begins at 10485.76
  CHECK(to_string(Bytes{(1u << 20) + 10486}) == "1.01 MiB");
  CHECK(to_string(3_GiB + 256_MiB) == "3.25 GiB");
  CHECK(to_string(1024_TiB) == "1.00 PiB");
  CHECK(to_string(Bytes{std::uint64_t{1} << 60}) == "1.00 EiB");
  CHECK(to_string(Bytes{~std::uint64_t{0}}) == "15.99 EiB");
  for (std::uint64_t hundredth = 0; hundredth < 100; ++hundredth) {
    const std::string expected = "1." + std::string(hundredth < 10 ? "0" : "") + std::to_string(hundredth);
    const std::uint64_t first = ((std::uint64_t{1} << 30) * hundredth + 99) / 100;  // the first byte count with it
    REQUIRE(to_string(1_GiB + Bytes{first}) == expected + " GiB");
  }
}

TEST_CASE("element types") {
  CHECK(size_of(DType::fp32) == 4_B);
  CHECK(size_of(DType::bf16) == 2_B);
  CHECK(size_of(DType::fp16) == 2_B);
  CHECK(to_string(DType::fp32) == "fp32");
  CHECK(to_string(DType::bf16) == "bf16");
  CHECK(to_string(DType::fp16) == "fp16");
  CHECK(dtype_of<float> == DType::fp32);
  CHECK(dtype_of<bf16> == DType::bf16);
  CHECK(dtype_of<fp16> == DType::fp16);
  static_assert(sizeof(bf16) == 2 && sizeof(fp16) == 2 && alignof(bf16) == 2);
  static_assert(std::is_trivially_copyable_v<bf16> && std::is_trivially_copyable_v<fp16>);
  CHECK(bf16{0x8000} != bf16{0});  // bits, not values
}

TEST_CASE("bf16: every value and every rounding boundary") { check_format<bf16>(8, 7); }
TEST_CASE("fp16: every value and every rounding boundary") { check_format<fp16>(5, 10); }

TEST_CASE("fp32 passes through, NaNs canonical") {
  for (const std::uint32_t x : {0u, 0x80000000u, 1u, 0x807fffffu, 0x7f800000u, 0xff800000u, 0x3f800000u}) {
    CHECK(bits(from_float<float>(to_float(std::bit_cast<float>(x)))) == x);
    CHECK(bits(canonical(std::bit_cast<float>(x))) == x);
  }
  for (const std::uint32_t x : {0x7f800001u, 0x7fc00000u, 0xffc00000u, 0xffffffffu}) {
    CHECK(bits(from_float<float>(std::bit_cast<float>(x))) == canonical_nan_bits);
    CHECK(bits(canonical(std::bit_cast<float>(x))) == canonical_nan_bits);
  }
  for (const std::uint64_t x :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0x7ff} << 52, std::uint64_t{0xfff} << 52}) {
    CHECK(std::bit_cast<std::uint64_t>(canonical(std::bit_cast<double>(x))) == x);
    CHECK(std::bit_cast<std::uint64_t>(canonical(std::bit_cast<double>(x | 0xfff0000000000001u))) ==
          ~std::uint64_t{0} >> 1);
  }
}

TEST_CASE("tiers and roles have names of their own") {
  CHECK(to_string(Tier::hbm) == "HBM");
  CHECK(to_string(Tier::pinned_host) == "pinned host memory");
  CHECK(to_string(Role::weight) == "weights");
  CHECK(to_string(Role::other) == "other");
  for (std::uint32_t a = 0; a < role_count; ++a) {
    CHECK(!to_string(static_cast<Role>(a)).empty());
    for (std::uint32_t b = 0; b < a; ++b) CHECK(to_string(static_cast<Role>(a)) != to_string(static_cast<Role>(b)));
  }
}

TEST_CASE("TensorInfo counts bytes in 64 bits") {
  const TensorInfo none;
  CHECK(none.bytes() == Bytes{});
  CHECK(none.layer == -1);
  CHECK(none.role == Role::other);
  TensorInfo info{.name = "wte",
                  .role = Role::weight,
                  .layer = 3,
                  .layers = 12,
                  .dtype = DType::bf16,
                  .count = (std::uint64_t{1} << 32) + 1};
  CHECK(info.bytes() == Bytes{(std::uint64_t{1} << 33) + 2});
  info.dtype = DType::fp32;
  CHECK(info.bytes() == Bytes{(std::uint64_t{1} << 34) + 4});
}

TEST_CASE("OutOfMemory says what was asked, what there is and who holds it") {
  OutOfMemory::Details details;
  details.tier = Tier::hbm;
  details.what_for = "blocks.3.mlp";
  details.requested = 3_MiB;
  details.capacity = 1_GiB;
  details.free = 2_MiB;
  details.largest_free = 1_MiB;
  details.by_role[static_cast<std::uint32_t>(Role::weight)] = 600_MiB;
  details.by_role[static_cast<std::uint32_t>(Role::activation)] = 422_MiB;
  details.largest = {{"wte", Role::weight, 150_MiB}, {"layer 0", Role::activation, 40_MiB}};
  details.remedy = "use --offload all";
  const OutOfMemory error{details};
  CHECK(std::string_view{error.what()} ==
        "HBM is full: blocks.3.mlp needs 3.00 MiB (3145728 bytes), free are 2.00 MiB of 1.00 GiB, largest free block "
        "1.00 MiB"
        "; held by weights 600.00 MiB, activations 422.00 MiB; largest: wte 150.00 MiB, layer 0 40.00 MiB; use "
        "--offload all");
  CHECK(error.details().requested == 3_MiB);
  CHECK(error.details().largest.size() == 2);
  CHECK(error.details().what_for == "blocks.3.mlp");
  // With nothing held there is nothing to list.
  OutOfMemory::Details empty;
  empty.tier = Tier::pinned_host;
  empty.what_for = "x";
  CHECK(
      std::string_view{OutOfMemory{empty}.what()} ==
      "pinned host memory is full: x needs 0 bytes (0 bytes), free are 0 bytes of 0 bytes, largest free block 0 bytes");
}

TEST_CASE("DeviceError keeps the call, its place and whether the context lives") {
  const auto here = std::source_location::current();
  const DeviceError failed{DeviceError::Kind::call_failed, "copy_async", "no such stream", here};
  CHECK_FALSE(failed.context_lost());
  CHECK(failed.kind() == DeviceError::Kind::call_failed);
  CHECK(failed.api() == "copy_async");
  CHECK(failed.where().line() == here.line());
  const std::string place = std::string{here.file_name()} + ":" + std::to_string(here.line());
  CHECK(failed.what() == "copy_async (" + place + "): no such stream");
  const DeviceError lost{DeviceError::Kind::context_lost, "synchronize", "a kernel threw", here};
  CHECK(lost.context_lost());
  CHECK(lost.what() == "synchronize (" + place + "): the device context is lost: a kernel threw");
}

TEST_CASE("every error is an Error, and a std::runtime_error") {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  static_assert(std::is_base_of_v<Error, InvalidArgument>);
  static_assert(std::is_base_of_v<Error, OutOfMemory>);
  static_assert(std::is_base_of_v<Error, DeviceError>);
  static_assert(std::is_base_of_v<Error, SlotsExhausted>);
  static_assert(std::is_base_of_v<Error, IoError>);
  CHECK_THROWS_WITH_AS(throw InvalidArgument{"depth is 0"}, "depth is 0", Error);
  CHECK_THROWS_WITH_AS(throw SlotsExhausted{"3 slots, held by a, b, c"}, "3 slots, held by a, b, c", Error);
  CHECK_THROWS_WITH_AS(throw IoError{"cannot read x"}, "cannot read x", std::runtime_error);
}

TEST_CASE("the instruction set of the host loops has a name") {
  CHECK(runs_here(ScalarIsa{}));
  CHECK(std::string_view{host_isa_name()} == (runs_here(Avx2Isa{}) ? "avx2+fma" : "scalar"));
}

TEST_CASE("the version's parts are the version") {
  CHECK(version_major * 10000 + version_minor * 100 + version_patch == HBMOFF_VERSION);
  CHECK(version_minor < 100);
  CHECK(version_patch < 100);
}
