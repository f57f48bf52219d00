// The formatters for fmt.
#include <cstddef>
#include <cstdint>
#include <string>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>  // its formatters of ranges must not collide with ours

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/interop/fmt.hpp"

using namespace hbmoff;

TEST_CASE("Bytes format as for people, and align as strings do") {
  CHECK(fmt::format("{}", 1536_KiB) == "1.50 MiB");
  CHECK(fmt::format("{}", Bytes{}) == "0 bytes");
  CHECK(fmt::format("[{:>12}]", 1536_KiB) == "[    1.50 MiB]");
  CHECK(fmt::format("[{:*<12}]", 1536_KiB) == "[1.50 MiB****]");
  CHECK(fmt::format("[{:^{}}]", 7_GiB, 10) == "[ 7.00 GiB ]");
  for (std::uint64_t n : {std::uint64_t{1}, std::uint64_t{1023}, std::uint64_t{1} << 31, ~std::uint64_t{0}}) {
    CHECK(fmt::format("{}", Bytes{n}) == to_string(Bytes{n}));
  }
}

TEST_CASE("tiers, roles and element types format as their names") {
  for (std::uint32_t tier = 0; tier < tier_count; ++tier) {
    CHECK(fmt::format("{}", static_cast<Tier>(tier)) == to_string(static_cast<Tier>(tier)));
  }
  for (std::uint32_t role = 0; role < role_count; ++role) {
    CHECK(fmt::format("{}", static_cast<Role>(role)) == to_string(static_cast<Role>(role)));
  }
  CHECK(fmt::format("{} {} {}", DType::fp32, DType::bf16, DType::fp16) == "fp32 bf16 fp16");
  CHECK(fmt::format("{:>5}|{:<9}|", Tier::hbm, Role::weight) == "  HBM|weights  |");
}

TEST_CASE("a tensor says what it is") {
  TensorInfo info;
  info.name = "wte";
  info.role = Role::weight;
  info.dtype = DType::bf16;
  info.count = 38597376;
  CHECK(fmt::format("{}", info) == "wte (weights, 38597376 x bf16, 73.61 MiB)");
  info.layer = 0;
  CHECK(fmt::format("{}", info) == "wte (weights, layer 0, 38597376 x bf16, 73.61 MiB)");
  info.layers = 12;
  info.layer = 3;
  info.dtype = DType::fp32;
  CHECK(fmt::format("{}", info) == "wte (weights, layer 3 of 12, 38597376 x fp32, 147.23 MiB)");
  info.layer = -1;
  CHECK(fmt::format("{}", info) == "wte (weights, 38597376 x fp32, 147.23 MiB)");
  CHECK(fmt::format("{}", TensorInfo{}) == " (other, 0 x fp32, 0 bytes)");
  CHECK(fmt::format("{:.3}|{:>60}|", info, info) ==
        "wte|" + std::string(60 - 42, ' ') + "wte (weights, 38597376 x fp32, 147.23 MiB)|");
}

TEST_CASE("a device span says where it is, and is not read") {
  // No such address can be read: formatting that looked inside would fault.
  const device_span<float> span{reinterpret_cast<float*>(std::uintptr_t{0x1000}), 393216};
  CHECK(fmt::format("{}", span) == "HBM 0x1000 + 1.50 MiB");
  CHECK(fmt::format("{}", device_span<const float>{span}) == "HBM 0x1000 + 1.50 MiB");
  CHECK(fmt::format("{}", device_span<const std::byte>{}) == "HBM 0x0 + 0 bytes");
  CHECK(fmt::format("{:>24}", span) == "   HBM 0x1000 + 1.50 MiB");
}

TEST_CASE("a pinned span is a range") {
  int values[] = {1, 2, 3};
  CHECK(fmt::format("{}", pinned_span<int>{values, 3}) == "[1, 2, 3]");
}
