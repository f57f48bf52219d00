// Test cases for any device: they touch device memory with copies and fills alone, so that they run wherever a program
// is. The file that includes this defines HBMOFF_SUITE_DEVICES, the devices, separated by commas.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "adamw_model.hpp"
#include "hbmoff/hbmoff.hpp"
#include "random.hpp"

namespace device_suite {

using namespace hbmoff;
using adamw_test::download;
using adamw_test::make_device;
using adamw_test::upload;
using random_numbers::Random;

inline std::vector<std::byte> content(std::uint64_t count, std::uint64_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(random_numbers::hash(seed * 1000003 + i) & 0xffu);
  }
  return bytes;
}

template <class D>
void order(D& device, typename D::StreamRef earlier, typename D::StreamRef later) {
  const auto event = device.create_event();
  device.record(event, earlier);
  device.wait(later, event);
}

/// Pinned memory that copies of any stream write to, each its own part; the host looks at it at the end.
template <class D>
class Captures {
 public:
  Captures(D& device, Bytes capacity) : device_{device}, memory_{device.allocate_pinned(capacity)} {}
  Captures(const Captures&) = delete;
  Captures& operator=(const Captures&) = delete;
  ~Captures() { device_.free_pinned(memory_); }

  void capture(device_span<const std::byte> from, std::vector<std::byte> expected, typename D::StreamRef stream) {
    REQUIRE(used_ + from.count() <= memory_.count());
    device_.copy_async(memory_.subspan(used_, from.count()), from, stream);
    used_ += from.count();
    expected_.insert(expected_.end(), expected.begin(), expected.end());
  }
  /// Once all streams are done.
  void check() {
    device_.note_host_access("look", {memory_.subspan(0, used_)}, {});
    CHECK(std::equal(expected_.begin(), expected_.end(), memory_.data()));
  }

 private:
  D& device_;
  pinned_span<std::byte> memory_;
  std::uint64_t used_ = 0;
  std::vector<std::byte> expected_;
};

TEST_CASE_TEMPLATE("copies of all sizes, at odd places", D, HBMOFF_SUITE_DEVICES) {
  D device = make_device<D>({});
  const auto stream = device.create_stream();
  const auto a = device.allocate_device(16_KiB), b = device.allocate_device(16_KiB);
  device.fill_async(a, std::byte{1}, stream);
  device.fill_async(b, std::byte{2}, stream);
  for (const std::uint64_t count : {0u, 1u, 3u, 127u, 256u, 257u, 4099u}) {
    for (const std::uint64_t offset : {0u, 1u, 13u}) {
      const auto bytes = content(count, count + offset);
      upload(device, stream, a.subspan(offset, count), bytes, "upload");
      device.copy_async(b.subspan(7, count), device_span<const std::byte>{a.subspan(offset, count)}, stream);
      CHECK(download(device, stream, b.subspan(7, count)) == bytes);
      CHECK(download(device, stream, b.subspan(7 + count, 1)).front() != std::byte{0xee});
      device.fill_async(b.subspan(7, count), std::byte{0xee}, stream);
      CHECK(download(device, stream, b.subspan(7, count)) == std::vector<std::byte>(count, std::byte{0xee}));
      CHECK(download(device, stream, b.subspan(6, 1)).front() == std::byte{2});
      device.fill_async(b, std::byte{2}, stream);
    }
  }
  CHECK_THROWS_AS(device.copy_async(a.subspan(0, 2), device_span<const std::byte>{b.subspan(0, 1)}, stream),
                  InvalidArgument);
  device.synchronize(typename D::StreamRef{stream});
  device.free_device(a);
  device.free_device(b);
}

TEST_CASE_TEMPLATE("events order streams: chains over three, the latest record, none before the first", D,
                   HBMOFF_SUITE_DEVICES) {
  D device = make_device<D>({});
  const auto a = device.create_stream("a"), b = device.create_stream("b"), c = device.create_stream("c");
  const auto x = device.allocate_device(64_KiB), y = device.allocate_device(64_KiB);
  const auto event = device.create_event(), never = device.create_event();
  device.wait(a, never);  // no work stands behind it
  if constexpr (takes_notes<D>) CHECK(device.reports().size() == 1);  // a warning
  CHECK(device.query(never));
  {
    Captures<D> captures{device, 64_KiB * 20};
    for (std::uint32_t round = 0; round < 20; ++round) {
      const auto value = static_cast<std::byte>(round + 1);
      device.fill_async(x, value, a);
      device.record(event, a);
      device.wait(b, event);
      device.copy_async(y, device_span<const std::byte>{x}, b);
      device.record(event, b);  // the same event again: the wait behind is for this record
      device.wait(c, event);
      captures.capture(y, std::vector<std::byte>(64 * 1024, value), c);
      device.record(event, c);
      device.wait(a, event);
      device.wait(b, event);
    }
    device.synchronize(event);
    CHECK(device.query(event));
    captures.check();
  }
  device.free_device(x);
  device.free_device(y);
}

TEST_CASE_TEMPLATE("memory of an arena passes from stream to stream in order", D, HBMOFF_SUITE_DEVICES) {
  D device = make_device<D>({});
  {
    const auto a = device.create_stream("a"), b = device.create_stream("b"), c = device.create_stream("c");
    const typename D::StreamRef streams[] = {a, b, c};
    HbmArena<D> arena{device, 96_KiB, {.max_blocks = 64, .fill_freed = true}};
    struct Held {
      typename HbmArena<D>::Buffer buffer;
      typename D::StreamRef stream;
      std::byte value;
    };
    Captures<D> captures{device, 4_MiB};
    std::vector<Held> held;
    Random random{11};
    for (std::uint32_t round = 0; round < 400; ++round) {
      if (held.empty() || random.next() % 2 == 0) {
        const auto stream = streams[random.next() % 3];
        auto buffer = arena.try_allocate(Bytes{1 + random.next() % 20000}, "buffer", Role::other, stream);
        if (buffer) {
          const auto value = static_cast<std::byte>(round & 0x7fu);
          device.fill_async(buffer->bytes(), value, stream);
          held.push_back({std::move(*buffer), stream, value});
          continue;
        }
      }
      if (held.empty()) continue;
      const std::size_t i = random.next() % held.size();
      const auto bytes = held[i].buffer.bytes();
      const std::uint64_t looked_at = std::min<std::uint64_t>(bytes.count(), 1000);
      captures.capture(bytes.subspan(bytes.count() - looked_at, looked_at),
                       std::vector<std::byte>(looked_at, held[i].value), held[i].stream);
      held[i].buffer.free(held[i].stream);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
    }
    held.clear();
    for (const auto stream : streams) device.synchronize(stream);
    captures.check();
  }
}

// Somebody writes behind a buffer.
template <class Arena, class D, class Write>
void check_overruns(D& device, Write&& write) {
  const auto stream = device.create_stream("compute");
  Arena arena{device, 64_KiB, {.max_blocks = 16, .fill_freed = true, .guard_band = 100_B}};
  CHECK(arena.allocate(Bytes{}, "nothing", Role::other, stream).size() == Bytes{});
  for (int round = 0; round < 3; ++round) {
    auto whole = arena.allocate(1000_B, "whole", Role::other, stream);
    auto overrun = arena.allocate(1001_B, "weights of layer 3", Role::other, stream);
    auto behind = arena.allocate(1000_B, "behind", Role::other, stream);
    write(whole.bytes(), 1000, stream);
    write(overrun.bytes(), round == 1 ? 1001 + 17 : 1001, stream);
    whole.free(stream);
    behind.free(stream);
    if (round == 1) {
      try {
        overrun.free(stream);
        CHECK(false);
      } catch (const Overrun& error) {
        CHECK(error.buffer() == "weights of layer 3");
        CHECK(error.behind() == 0);
      }
      CHECK(overrun.size() == 1001_B);
    }
    overrun.free(stream);
    CHECK(overrun.size() == Bytes{});
  }
  device.synchronize(typename D::StreamRef{stream});
  CHECK(arena.try_allocate(63_KiB, "all", Role::other, stream).has_value());
  using Options = ArenaOptions;
  CHECK_THROWS_AS((Arena{device, 64_KiB, Options{.guard_band = 2_MiB}}), InvalidArgument);
}

TEST_CASE_TEMPLATE("guard bands tell whose end was passed", D, HBMOFF_SUITE_DEVICES) {
  D device = make_device<D>({});
  const auto fill = [&](device_span<std::byte> memory, std::uint64_t count, typename D::StreamRef stream) {
    device.fill_async(device_span<std::byte>{memory.data(), count}, std::byte{0x11}, stream);
  };
  check_overruns<HbmArena<D>>(device, fill);
  const auto write = [&](pinned_span<std::byte> memory, std::uint64_t count, typename D::StreamRef stream) {
    device.note_access(stream, "write", {}, {AccessRange{memory.data(), Bytes{count}}});
    device.host_func(stream, [=] { std::memset(memory.data(), 0x11, count); });
  };
  check_overruns<PinnedHostArena<D>>(device, write);
}

// Random sweeps of two schedulers over one home, against a plain array of bytes.
template <class D>
void random_sweeps(std::uint64_t seed, std::uint32_t depth, bool shared) {
  constexpr std::uint64_t home_bytes = 6 * 1024, page_bytes = 1024, half = page_bytes / 2;
  Random random{seed};
  D device = make_device<D>({});
  const auto a = device.create_stream("a"), b = device.create_stream("b");
  const typename D::StreamRef streams[] = {a, b};
  HbmArena<D> hbm{device, 256_KiB, {.fill_freed = true}};
  PinnedHostArena<D> host{device, 256_KiB, {.fill_freed = true}};
  Captures<D> captures{device, 2_MiB};
  Home<D> home{host, Bytes{home_bytes}, "home", Role::other, a};
  std::vector<std::byte> model = content(home_bytes, seed);
  home.synchronize(0, home_bytes);
  device.note_host_access("load", {}, {home.memory()});
  std::memcpy(home.memory().data(), model.data(), home_bytes);

  using Scheduler = PrefetchScheduler<D, OffloadAll, dynamic_depth>;
  std::optional<SlotPool<D>> pool;
  if (shared) pool.emplace(hbm, Bytes{page_bytes}, 2 * depth, Role::other, a);
  std::optional<Scheduler> schedulers[2];
  struct PageInfo {
    PageId id;
    std::uint64_t first, count;
  };
  std::vector<PageInfo> pages[2];
  for (std::uint32_t s = 0; s < 2; ++s) {
    const SchedulerOptions options{.depth = depth, .guaranteed_slots = shared ? depth : 0, .fill_evicted = true};
    if (pool) {
      schedulers[s].emplace(*pool, hbm, options);
    } else {
      schedulers[s].emplace(hbm, Bytes{page_bytes}, Role::other, options);
    }
    // The second one's pages lie across the first one's.
    for (std::uint64_t first = 0; first < home_bytes;) {
      const std::uint64_t count = std::min(s == 1 && first == 0 ? half : page_bytes, home_bytes - first);
      pages[s].push_back({schedulers[s]->add_page({.label = "page at " + std::to_string(first),
                                                   .parts = {{&home, first, 0, Bytes{count}, Access::read_write}},
                                                   .slot_bytes = Bytes{page_bytes}}),
                          first, count});
      first += count;
    }
  }
  for (std::uint32_t sweep = 0; sweep < 12; ++sweep) {
    const std::uint32_t s = random.next() % 2;
    std::vector<PlanStep> steps;
    std::vector<PageInfo> visited;
    for (std::uint32_t i = 0; i < 8; ++i) {
      const PageInfo& page = pages[s][random.next() % pages[s].size()];
      constexpr Access accesses[] = {Access::read, Access::write, Access::read_write};
      visited.push_back(page);
      steps.push_back({page.id, accesses[random.next() % 3]});
    }
    Scheduler& scheduler = *schedulers[s];
    scheduler.begin(scheduler.add_plan(steps));
    const auto stream = streams[random.next() % 2];
    for (std::size_t i = 0; i < steps.size(); ++i) {
      auto lease = scheduler.lease(steps[i].page, stream);
      const auto memory = lease.bytes().subspan(0, visited[i].count);
      const auto begin = model.begin() + static_cast<std::ptrdiff_t>(visited[i].first);
      const auto end = begin + static_cast<std::ptrdiff_t>(visited[i].count);
      if (steps[i].access != Access::write) captures.capture(memory, {begin, end}, stream);
      if (steps[i].access == Access::read) continue;  // its destructor ends it
      const auto value = static_cast<std::byte>(random.next());
      std::uint64_t first = 0, count = visited[i].count;
      if (steps[i].access == Access::read_write) {
        first = random.next() % count;
        count = 1 + random.next() % (count - first);
      }
      device.fill_async(memory.subspan(first, count), value, stream);
      std::fill_n(begin + static_cast<std::ptrdiff_t>(first), count, value);
      lease.commit();
    }
    scheduler.finish(stream);
  }
  home.synchronize(0, home_bytes);
  device.note_host_access("look", {home.memory()}, {});
  CHECK(std::equal(model.begin(), model.end(), home.memory().data()));
  for (const auto stream : streams) device.synchronize(stream);
  captures.check();
}

TEST_CASE_TEMPLATE("random sweeps of two schedulers over one home give the bytes of a plain array", D,
                   HBMOFF_SUITE_DEVICES) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    for (const std::uint32_t depth : {1u, 2u, 3u}) {
      for (const bool shared : {false, true}) {
        INFO("seed ", seed, ", depth ", depth, shared ? ", shared slots" : "");
        random_sweeps<D>(seed, depth, shared);
      }
    }
  }
}

template <class D, std::uint32_t Depth, class Policy>
void forward_and_backward(Policy policy, std::uint32_t layers, TransferStats expected_per_step) {
  D device = make_device<D>({});
  HbmArena<D> hbm{device, 4_MiB, {.fill_freed = true}};
  PinnedHostArena<D> host{device, 4_MiB, {.fill_freed = true}};
  const auto stream = device.create_stream();
  const BundleLayout layout{{{.info = {.name = "x", .count = 1021}, .checkpoint = true},
                             {.info = {.name = "y", .dtype = DType::bf16, .count = 77}}}};
  ActivationStore<D, Policy, Depth> store{hbm, host, policy, layers, layout};
  const auto bytes_of = [](auto& saved, std::uint32_t t) {
    return t == 0 ? saved.template tensor<float>(0).bytes() : saved.template tensor<bf16>(1).bytes();
  };
  for (std::uint64_t step = 0; step < 3; ++step) {
    const TransferStats before = store.stats();
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = store.save(l, stream);
      for (std::uint32_t t = 0; t < 2; ++t) {
        const auto bytes = bytes_of(saved, t);
        upload(device, stream, bytes, content(bytes.count(), step * 1000 + l * 10 + t), "save");
      }
      saved.commit();
    }
    for (std::uint32_t l = layers; l-- > 0;) {
      auto saved = store.restore(l, stream);
      for (std::uint32_t t = 0; t < 2; ++t) {
        const auto bytes = bytes_of(saved, t);
        REQUIRE(download(device, stream, bytes) == content(bytes.count(), step * 1000 + l * 10 + t));
      }
    }
    const TransferStats moved = store.stats() - before;
    CHECK(moved.fills == expected_per_step.fills);
    CHECK(moved.write_backs == expected_per_step.write_backs);
  }
  device.synchronize(typename D::StreamRef{stream});
}

TEST_CASE_TEMPLATE("activations: the last layers stay, the others go to host memory and come back", D,
                   HBMOFF_SUITE_DEVICES) {
  forward_and_backward<D, 2>(OffloadAll{}, 7, {.fills = 5, .write_backs = 5});
  forward_and_backward<D, 3>(OffloadAll{}, 7, {.fills = 4, .write_backs = 4});
  forward_and_backward<D, 3>(OffloadAll{}, 2, {});
  forward_and_backward<D, 3>(KeepResident{}, 7, {});
}

TEST_CASE_TEMPLATE("host functions run in stream order", D, HBMOFF_SUITE_DEVICES) {
  D device = make_device<D>({});
  const auto a = device.create_stream("a"), b = device.create_stream("b");
  std::vector<int> ran;
  for (int i = 0; i < 10; ++i) {
    device.note_access(i % 2 == 0 ? a : b, "a host function", {}, {});
    device.host_func(i % 2 == 0 ? a : b, [&ran, i] { ran.push_back(i); });
    order(device, i % 2 == 0 ? a : b, i % 2 == 0 ? b : a);
  }
  device.synchronize(typename D::StreamRef{a});
  CHECK(ran == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  device.synchronize(typename D::StreamRef{b});
}

TEST_CASE_TEMPLATE("PagedAdamW gives the bits of the plain model", D, HBMOFF_SUITE_DEVICES) {
  const std::vector<adamw_test::TensorSpec> specs{{"a", 300, DType::fp32, DType::fp32, 0},
                                                  {"b", 170, DType::bf16, DType::fp32, 0},
                                                  {"c", 1, DType::bf16, DType::bf16, 0},
                                                  {"d", 0, DType::fp32, DType::fp32, 0}};
  adamw_test::Rig<D> rig{specs};
  adamw_test::AdamWModel model = rig.initial;
  PagedAdamW<D, OffloadMatching, 2> optimizer{rig.hbm, rig.host, OffloadMatching{{"a", "c"}}, {.page = 1_KiB}};
  rig.add_all(optimizer);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const adamw_test::GradientSource source{.seed = 5, .step = step};
    const std::vector<AdamWGroup> groups = adamw_test::groups_at(1, step);
    optimizer.group(GroupId{0}) = groups[0];
    rig.write_gradients(source);
    const AdamWStep options{.max_norm = 0.5f};
    optimizer.step(rig.stream, options);
    const StepReport expected = model.step(source, groups, options), report = optimizer.report(step);
    CHECK(report.applied == expected.applied);
    CHECK(bit_cast<std::uint64_t>(report.norm) == bit_cast<std::uint64_t>(expected.norm));
  }
  rig.check_equal(optimizer, model);
}

}  // namespace device_suite
