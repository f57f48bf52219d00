// Bytes over the link, for optimizer and activations: equal to closed forms computed here from the list of tensors.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/training/activation_store.hpp"
#include "hbmoff/training/paged_adamw.hpp"
#include "support/activation_model.hpp"
#include "support/adamw_model.hpp"

using namespace hbmoff;

namespace {

using adamw_test::mixed_tensors;
using adamw_test::Rig;
using adamw_test::TensorSpec;

/// Bytes of the pages of one family, and of its largest page. `arrays`: 2 for m and v, 3 with masters. Marks every
/// element on one long line on which a tensor starts at a multiple of 16, and cuts it into pages.
struct Pages {
  std::uint64_t count = 0, bytes = 0;
};
Pages pages_of(const std::vector<std::uint64_t>& tensors, std::uint64_t arrays, std::uint64_t page) {
  std::uint64_t page_elements = 64;
  while ((page_elements + 64) * 4 * arrays <= page) page_elements += 64;
  std::vector<bool> line;
  for (const std::uint64_t count : tensors) {
    if (count == 0) continue;
    while (line.size() % 16 != 0) line.push_back(false);
    line.insert(line.end(), count, true);
  }
  Pages pages;
  for (std::uint64_t first = 0; first < line.size(); first += page_elements) {
    std::uint64_t elements = 0;
    for (std::uint64_t i = 0; i < page_elements && first + i < line.size(); ++i) {
      if (line[first + i]) elements = i + 1;
    }
    std::uint64_t stride = 4 * elements;
    while (stride % 256 != 0) ++stride;
    ++pages.count;
    pages.bytes += (arrays - 1) * stride + 4 * elements;
  }
  return pages;
}

struct Traffic {
  std::uint64_t in = 0, out = 0, fills = 0, write_backs = 0;
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

/// What crosses the link by the scheduler's count, checked against what was called on the device. `reports`: steps made.
template <class Run>
Traffic traffic(LoggingDevice& device, const auto& store, std::uint64_t reports, Run&& run) {
  const TransferStats before = store.stats();
  const LoggingDevice::Counts counts = device.counts();
  run();
  const TransferStats moved = store.stats() - before;
  const LoggingDevice::Counts called = device.counts() - counts;
  CHECK(called.h2d_bytes == moved.h2d_bytes);
  CHECK(called.d2h_bytes == moved.d2h_bytes + 32 * reports);
  CHECK(called.h2d_copies == moved.fills);  // one copy a page
  CHECK(called.d2h_copies == moved.write_backs + reports);
  return {moved.h2d_bytes, moved.d2h_bytes, moved.fills, moved.write_backs};
}

template <class Policy>
void check_optimizer(const std::vector<TensorSpec>& specs, Policy policy, std::uint64_t page,
                     const std::function<bool(const TensorSpec&)>& offloaded, std::uint32_t depth = 3) {
  INFO("page ", page, " depth ", depth);
  std::vector<std::uint64_t> plain, with_master;
  for (const TensorSpec& spec : specs) {
    if (offloaded(spec)) (spec.weight == DType::fp32 ? plain : with_master).push_back(spec.count);
  }
  const Pages two = pages_of(plain, 2, page), three = pages_of(with_master, 3, page);
  const std::uint64_t bytes = two.bytes + three.bytes, count = two.count + three.count;

  Rig rig{specs};
  PagedAdamW<LoggingDevice, Policy, dynamic_depth> optimizer{
      rig.hbm, rig.host, policy, {.page = Bytes{page}, .depth = depth}};
  rig.add_all(optimizer);
  // The first states are made on the device: nothing comes in.
  optimizer.prepare(rig.stream);
  CHECK(optimizer.stats() == TransferStats{.d2h_bytes = bytes, .write_backs = count});
  CHECK(optimizer.offloaded_pages() == count);
  for (std::uint64_t s = 1; s <= 3; ++s) {
    const Traffic step = traffic(rig.device, optimizer, 1, [&] {
      rig.write_gradients({.step = s});
      optimizer.step(rig.stream, {.max_norm = 1.0f, .skip_nonfinite = s == 2});
    });
    CHECK(step == Traffic{bytes, bytes, count, count});
  }
  // A frozen tensor's state travels with its page all the same: what moves does not depend on what is active.
  if (!specs.empty()) {
    optimizer.set_frozen(optimizer.id(specs[0].name), true);
    CHECK(traffic(rig.device, optimizer, 1, [&] { optimizer.step(rig.stream); }) ==
          Traffic{bytes, bytes, count, count});
  }
  CHECK(traffic(rig.device, optimizer, 0, [&] { optimizer.refresh(rig.stream, Moments::reset); }) ==
        Traffic{0, bytes, 0, count});
  CHECK(traffic(rig.device, optimizer, 0, [&] { optimizer.refresh(rig.stream, Moments::keep); }) ==
        Traffic{three.bytes, three.bytes, three.count, three.count});  // pages without masters stay where they are
  rig.device.synchronize(rig.stream);
}

}  // namespace

TEST_CASE("optimizer: bytes in and out equal the closed form for every policy, page size and depth") {
  const auto all = [](const TensorSpec&) { return true; };
  const auto none = [](const TensorSpec&) { return false; };
  for (const std::uint64_t page : {768u, 1024u, 7168u, 65536u, 1u << 20}) {
    check_optimizer(mixed_tensors(), OffloadOptimizerState{}, page, all);
    check_optimizer(mixed_tensors(), OffloadAll{}, page, all);
    check_optimizer(mixed_tensors(), KeepResident{}, page, none);
    check_optimizer(mixed_tensors(), OffloadActivations{}, page, none);
    check_optimizer(mixed_tensors(), OffloadLargerThan{500_B}, page,
                    [](const TensorSpec& spec) { return 4 * spec.count > 500; });
    check_optimizer(mixed_tensors(), OffloadMatching{{"tensor.1*"}}, page,
                    [](const TensorSpec& spec) { return spec.name.starts_with("tensor.1"); });
  }
  check_optimizer(mixed_tensors(), OffloadOptimizerState{}, 1024, all, 1);
  check_optimizer(mixed_tensors(), OffloadOptimizerState{}, 1024, all, 2);
  check_optimizer(mixed_tensors(), OffloadOptimizerState{}, 1024, all, 4);
  check_optimizer({}, OffloadAll{}, 1024, all);
}

TEST_CASE("optimizer: bytes of a few tensors, in figures") {
  const auto bytes_of = [](std::vector<TensorSpec> specs, std::uint64_t page) -> std::uint64_t {
    Rig rig{std::move(specs)};
    PagedAdamW optimizer{rig.hbm, rig.host, OffloadAll{}, {.page = Bytes{page}}};
    rig.add_all(optimizer);
    optimizer.prepare(rig.stream);
    const TransferStats before = optimizer.stats();
    optimizer.step(rig.stream);
    const TransferStats moved = optimizer.stats() - before;
    CHECK(moved.h2d_bytes == moved.d2h_bytes);
    rig.device.synchronize(rig.stream);
    return moved.h2d_bytes;
  };
  CHECK(bytes_of({{"one", 1}}, 1 << 20) == 256 + 4);  // m padded to 256, v not
  CHECK(bytes_of({{"t", 64}}, 1 << 20) == 2 * 256);
  CHECK(bytes_of({{"t", 1000}}, 1 << 20) == 4096 + 4000);
  CHECK(bytes_of({{"t", 1000, DType::bf16}}, 1 << 20) == 2 * 4096 + 4000);
  CHECK(bytes_of({{"t", 1 << 17}}, 1 << 20) == 1 << 20);  // one full page, no padding
  CHECK(bytes_of({{"t", (1 << 17) + 1}}, 1 << 20) == (1 << 20) + 260);
  CHECK(bytes_of({{"a", 3}, {"b", 3}}, 1 << 20) == 256 + 4 * 19);  // b starts at element 16
  CHECK(bytes_of({{"a", 60}, {"b", 60}}, 768) == 2 * (256 + 240));  // a page each: 64 elements fit
  CHECK(bytes_of({{"a", 40}, {"b", 40}}, 768) == 512 + 256 + 4 * 24);  // b is cut behind its 16th element
}

// ------------------------------------------------------------------------------------------------ activations

namespace {

using namespace activation_test;

constexpr SaveMode keep = SaveMode::keep, offload = SaveMode::offload, recompute = SaveMode::recompute;

/// `modes(layer, tensor)` says what becomes of a tensor. The layers that need a slot pass through it; the last `depth`
/// of them are still there when the backward wants them.
template <class Policy>
void check_activations(Policy policy, std::uint32_t depth, std::uint32_t layers,
                       const std::function<SaveMode(std::uint32_t, std::uint32_t)>& modes) {
  INFO("depth ", depth, " layers ", layers);
  const BundleLayout layout = layer_layout();
  Bench bench;
  ActivationStore<LoggingDevice, Policy, dynamic_depth> store{bench.hbm, bench.host, policy,
                                                              layers,    layout,     {.depth = depth}};
  const auto backward = [&] {
    for (std::uint32_t l = layers; l-- > 0;) static_cast<void>(store.restore(l, bench.stream));
  };
  for (const std::uint64_t rows : {6u, 1u, 5u, 6u}) {
    std::vector<std::uint64_t> through_slots;
    for (std::uint32_t l = 0; l < layers; ++l) {
      std::vector<std::uint32_t> offloaded;
      bool slot = false;
      for (const std::uint32_t i : {input, hidden, mask, statistics}) {  // the view of `hidden` travels with it
        if (modes(l, i) == offload) offloaded.push_back(i);
        slot = slot || modes(l, i) != keep;
      }
      if (slot) through_slots.push_back(padded_bytes(offloaded, rows));
    }
    Traffic expected;
    for (std::size_t i = 0; i + depth < through_slots.size(); ++i) {
      expected.in += through_slots[i];
      expected.fills += through_slots[i] != 0 ? 1 : 0;
    }
    expected.out = expected.in;
    expected.write_backs = expected.fills;

    CHECK(traffic(bench.device, store, 0, [&] {
            run_forward(bench.device, bench.stream, store, layout, rows, rows);
            backward();
          }) == expected);
    // Evaluations move nothing, and nothing of the pass after them.
    CHECK(traffic(bench.device, store, 0,
                  [&] { run_forward(bench.device, bench.stream, store, layout, rows, rows, false); }) == Traffic{});
    // A forward whose backward never comes sends what does not fit the slots, and no more, also later.
    CHECK(traffic(bench.device, store, 0, [&] {
            run_forward(bench.device, bench.stream, store, layout, rows, rows);
          }).out == expected.out);
    CHECK(traffic(bench.device, store, 0, [&] {
            run_forward(bench.device, bench.stream, store, layout, rows, rows, false);
          }).out == 0);
  }
  bench.device.synchronize(bench.stream);
}

}  // namespace

TEST_CASE(
    "activations: bytes in and out are those of the offloaded layers but the last ones, which stay in their slots") {
  const auto all = [](auto, auto) { return offload; };
  for (const std::uint32_t layers : {1u, 3u, 4u, 9u, 16u}) {
    check_activations(OffloadAll{}, 1, layers, all);
    check_activations(OffloadAll{}, 2, layers, all);
    check_activations(OffloadAll{}, 3, layers, all);
    check_activations(OffloadAll{}, 4, layers, all);
    check_activations(KeepResident{}, 3, layers, [](auto, auto) { return keep; });
    check_activations(KeepLastLayers{2}, 3, layers, [&](auto l, auto) { return l + 2 >= layers ? keep : offload; });
    check_activations(RecomputeFirstLayers{5, OffloadAll{}}, 3, layers,
                      [](auto l, auto i) { return l < 5 && i != input ? recompute : offload; });
    check_activations(RecomputeFirstLayers{5}, 3, layers,
                      [](auto l, auto i) { return l < 5 && i != input ? recompute : keep; });
    check_activations(RecomputeMatching{{"hidden*", "mask"}, OffloadAll{}}, 2, layers,
                      [](auto, auto i) { return i == hidden || i == mask ? recompute : offload; });
    check_activations(RecomputeMatching{{"*"}}, 3, layers, [](auto, auto i) { return i == input ? keep : recompute; });
    check_activations(KeepLastLayers{2, RecomputeMatching{{"*"}, OffloadAll{}}}, 3, layers, [&](auto l, auto i) {
      return l + 2 >= layers ? keep : i == input ? offload : recompute;
    });
    check_activations(OffloadLargerThan{300_B}, 3, layers, [](auto, auto i) { return i == hidden ? offload : keep; });
  }
}
