// Counts past 2^31 and bytes past 2^33, on a device whose memory is addresses only: nothing wraps, nothing is left out.
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/planning/estimate.hpp"
#include "hbmoff/training/activation_store.hpp"
#include "hbmoff/training/paged_adamw.hpp"
#include "support/logging_device.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;

namespace {

constexpr std::uint64_t two_31 = std::uint64_t{1} << 31;

struct Machine {
  LoggingDevice device{HostDeviceOptions{.hbm_capacity = 1_TiB, .ring_capacity = 1 << 14, .no_touch = true}};
  HbmArena<LoggingDevice> hbm{device, 128_GiB, {.max_blocks = 4096}};
  PinnedHostArena<LoggingDevice> host{device, 128_GiB, {.max_blocks = 8192}};
  LoggingDevice::Stream stream = device.create_stream("compute");
};

// Two steps and a refresh of these tensors, which move `bytes` in `pages` each way.
template <class W, class G, class Policy>
void check_steps(const std::vector<std::uint64_t>& counts, Policy policy, Bytes page, std::uint64_t bytes,
                 std::uint64_t pages) {
  const Watchdog watchdog{"large steps"};
  Machine m;
  std::vector<HbmArena<LoggingDevice>::Buffer> buffers;
  PagedAdamW optimizer{m.hbm, m.host, policy, {.page = page}};
  for (const std::uint64_t count : counts) {
    const std::string name = "t" + std::to_string(buffers.size());
    buffers.push_back(m.hbm.allocate(Bytes{count * sizeof(W)}, name, Role::weight, m.stream));
    const auto weight = buffers.back().as<W>();
    buffers.push_back(m.hbm.allocate(Bytes{count * sizeof(G)}, name, Role::gradient, m.stream));
    optimizer.add(TensorInfo{.name = name, .dtype = dtype_of<W>, .count = count}, weight,
                  buffers.back().template as<G>());
    CHECK(weight.count() == count);
  }
  optimizer.prepare(m.stream);
  CHECK(optimizer.stats() == TransferStats{.d2h_bytes = bytes, .write_backs = pages});
  for (std::uint64_t s = 1; s <= 2; ++s) {
    const TransferStats before = optimizer.stats();
    const LoggingDevice::Counts counted = m.device.counts();
    CHECK(optimizer.step(m.stream, {.max_norm = 1.0f}) == s);
    const TransferStats moved = optimizer.stats() - before;
    CHECK(moved == TransferStats{.h2d_bytes = bytes, .d2h_bytes = bytes, .fills = pages, .write_backs = pages});
    CHECK((m.device.counts() - counted).h2d_bytes == bytes);
    CHECK((m.device.counts() - counted).d2h_bytes == bytes + 32);
  }
  optimizer.refresh(m.stream);
  m.device.synchronize(m.stream);
}

}  // namespace

TEST_CASE("one tensor of more than 2^31 elements, in pages of 64 MiB") {
  // 2^23 elements of m and v to a page; the last page has 5: 256 + 20 bytes.
  check_steps<float, float>({two_31 + 5}, OffloadOptimizerState{}, 64_MiB, two_31 * 8 + 276, 257);
}

TEST_CASE("one tensor of more than 2^32 16-bit elements, with masters") {
  // 64 MiB are 5592405 times 12 bytes: rounded down to a multiple of 64, 5592384 elements to a page.
  const std::uint64_t count = 2 * two_31 + 7, per_page = 5592384;
  const std::uint64_t full = count / per_page, rest = count % per_page;
  const std::uint64_t last = 2 * ((4 * rest + 255) / 256 * 256) + 4 * rest;
  check_steps<bf16, float>({count}, OffloadAll{}, 64_MiB, full * per_page * 12 + last, full + 1);
}

TEST_CASE("many tensors of more than 2^31 elements in all, each smaller") {
  // 12 tensors of 2^28: 32 pages each, side by side.
  check_steps<float, bf16>(std::vector<std::uint64_t>(12, two_31 / 8), OffloadOptimizerState{}, 64_MiB,
                           12 * (two_31 / 8) * 8, 12 * 32);
}

TEST_CASE("resident, nothing crosses the link, however large") {
  check_steps<float, float>({two_31 + 5, two_31}, KeepResident{}, 1_GiB, 0, 0);
}

TEST_CASE("what lies in no memory is not read, and says so") {
  Machine m;
  auto weight = m.hbm.allocate(Bytes{400}, "w", Role::weight, m.stream);
  PagedAdamW optimizer{m.hbm, m.host, OffloadOptimizerState{}};
  optimizer.add(TensorInfo{.name = "w", .count = 100}, weight.as<float>(), weight.as<const float>());
  optimizer.step(m.stream);
  std::vector<float> values(100);
  CHECK_THROWS_AS(static_cast<void>(optimizer.report(1)), InvalidArgument);
  CHECK_THROWS_AS(optimizer.read("w", OptimizerState::first_moment, values), InvalidArgument);
  CHECK_THROWS_AS(optimizer.write("w", OptimizerState::first_moment, values), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(optimizer.applied_steps("w")), InvalidArgument);
  m.device.synchronize(m.stream);
}

TEST_CASE("activations of 2^33 bytes and more a layer, 2^36 in all") {
  const Watchdog watchdog{"large activations"};
  Machine m;
  const std::uint64_t rows = 3, row = two_31 + 1;  // fp32 elements of one row: 2^33 + 4 bytes
  const BundleLayout layout{{{.info = {.name = "x", .count = rows * row}, .checkpoint = true},
                             {.info = {.name = "y", .dtype = DType::bf16, .count = rows * 5}},
                             {.info = {.name = "z", .dtype = DType::fp16, .count = rows * row}}},
                            rows};
  struct RecomputeZ {
    [[nodiscard]] SaveMode save(const TensorInfo& info) const {
      return info.name == "z" ? SaveMode::recompute : SaveMode::offload;
    }
  };
  const std::uint32_t layers = 5;
  ActivationStore<LoggingDevice, RecomputeZ, 2> store{m.hbm, m.host, RecomputeZ{}, layers, layout};
  CHECK(m.host.usage().used ==
        estimate_activations(RecomputeZ{}, layers, layout, {.depth = 2}).total(Tier::pinned_host));
  CHECK(m.host.usage().used > Bytes{layers * rows * row * 4});
  for (const std::uint64_t n : {std::uint64_t{3}, std::uint64_t{1}}) {
    const TransferStats before = store.stats();
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = store.save(l, m.stream, n);
      CHECK(saved.tensor<float>(0).count() == n * row);
      CHECK(saved.tensor<fp16>(2).count() == n * row);
      // The third tensor lies behind the first two: past 2^32 bytes.
      const auto* first = reinterpret_cast<const std::byte*>(saved.tensor<float>(0).data());
      const auto* third = reinterpret_cast<const std::byte*>(saved.tensor<fp16>(2).data());
      CHECK(static_cast<std::uint64_t>(third - first) == (4 * n * row + 255) / 256 * 256 + 256);
      saved.commit();
    }
    for (std::uint32_t l = layers; l-- > 0;) CHECK(store.restore(l, m.stream).missing(2) == (l < layers - 2));
    const std::uint64_t offloaded = (4 * n * row + 255) / 256 * 256 + 10 * n;
    const TransferStats moved = store.stats() - before;
    CHECK(moved.h2d_bytes == (layers - 2) * offloaded);
    CHECK(moved.d2h_bytes == (layers - 2) * offloaded);
  }
  m.device.synchronize(m.stream);
}

TEST_CASE("kernels reach elements past 2^31 of memory that is there") {
  using namespace adamw_kernels;
  // Only a few pages of the reservation are touched, and so exist.
  HostDevice device{{.hbm_capacity = 32_GiB}};
  const std::uint64_t far = two_31 + 12345, count = far + 100;
  const auto weight = device.allocate_device(Bytes{count * 2}).as<bf16>();
  const auto gradient = device.allocate_device(Bytes{count * 4}).as<float>();
  Tensor tensor{weight.data(), gradient.data(), count, 0, 0, DType::bf16, DType::fp32, false};
  AdamWSlice slice{.tensor = 0, .tensor_first = far, .page_first = 64, .count = 100};
  AdamWCoefficients coefficients = adamw_coefficients(1e-2f, 0.1f, 0.9f, 0.99f, 1e-8f, 1.0, 1);
  Tables tables{};
  tables.tensors = &tensor;
  tables.slices = &slice;
  tables.coefficients = &coefficients;
  tables.tensor_count = 1;
  std::vector<float> arrays(3 * 192, -1.0f);
  const PageMemory page{reinterpret_cast<std::byte*>(arrays.data()), 192 * 4, arrays.size() * 4, 0, 1, true};
  for (std::uint64_t i = 0; i < 100; ++i) {
    weight.data()[far + i] = from_float<bf16>(static_cast<float>(i) - 50.0f);
    gradient.data()[far + i] = 1.0f / static_cast<float>(i + 1);
  }
  InitialisePage{tables, page, false}();
  UpdatePage{tables, page}();
  for (std::uint64_t i = 0; i < 100; ++i) {
    const AdamWState next =
        adamw_update({0, 0, static_cast<float>(i) - 50.0f}, 1.0f / static_cast<float>(i + 1), coefficients);
    CHECK(arrays[64 + i] == next.m);
    CHECK(arrays[192 + 64 + i] == next.v);
    CHECK(arrays[384 + 64 + i] == next.w);
    CHECK(weight.data()[far + i] == from_float<bf16>(next.w));
  }
  CHECK(weight.data()[far - 1] == bf16{0});
  CHECK(arrays[0] == 0.0f);  // the page's padding
  device.free_device(weight.bytes());
  device.free_device(gradient.bytes());
}
