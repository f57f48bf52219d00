// After its first step a training takes no memory, from the heap or the arenas, and makes no stream and no event.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include <doctest/doctest.h>

#include "hbmoff/training/activation_store.hpp"
#include "hbmoff/training/paged_adamw.hpp"
#include "support/activation_model.hpp"
#include "support/adamw_model.hpp"
#include "support/allocation_counter.hpp"
#include "support/logging_device.hpp"

using namespace hbmoff;

namespace {

using activation_test::layer_layout;
using adamw_test::mixed_tensors;
using adamw_test::Rig;

struct OneOfEach {
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    return info.name == "mask" ? SaveMode::recompute : info.name == "statistics" ? SaveMode::keep : SaveMode::offload;
  }
  [[nodiscard]] Tier home(const TensorInfo& info) const { return info.count > 100 ? Tier::pinned_host : Tier::hbm; }
};

bool equal(const ArenaUsage& a, const ArenaUsage& b) {
  bool same = a.used == b.used && a.high_water == b.high_water && a.free == b.free && a.largest_free == b.largest_free;
  for (std::uint32_t role = 0; role < role_count; ++role) same = same && a.by_role[role] == b.by_role[role];
  return same;
}

template <class Policy>
void check_steady(Policy policy, std::uint32_t depth) {
  INFO("depth ", depth);
  const BundleLayout layout = layer_layout();
  Rig rig{mixed_tensors(6)};
  PagedAdamW<LoggingDevice, Policy, dynamic_depth> optimizer{
      rig.hbm, rig.host, policy, {.page = 1_KiB, .depth = depth, .fill_evicted = true}};
  adamw_test::set_groups(optimizer, adamw_test::groups_at(6, 1), true);
  rig.add_all(optimizer);
  ActivationStore<LoggingDevice, Policy, dynamic_depth> store{
      rig.hbm, rig.host, policy, 9, layout, {.depth = depth, .fill_evicted = true}};
  const TensorId changing = optimizer.id("tensor.0");
  const auto gradient = rig.gradients[0].template as<float>();
  const LoggingDevice::Stream side = rig.device.create_stream("side");
  constexpr std::uint64_t last_step = 12;
  std::uint64_t missing = 0, reports = 0, wrong_norms = 0;
  const auto look_at = [&](const StepReport& report) {
    ++reports;
    if (!(std::isfinite(report.norm) && report.norm > 0)) ++wrong_norms;
  };

  const auto step = [&](std::uint64_t s, std::uint64_t rows) {
    for (std::uint32_t l = 0; l < store.layers(); ++l) {
      auto saved = store.save(l, rig.stream, rows);
      saved.used_on(side);
      rig.device.enqueue(rig.stream, [to = saved.template tensor<float>(0)] {
        for (std::uint64_t i = 0; i < to.count(); ++i) to.data()[i] = 1.0f;
      });
      if (s % 3 != 0) saved.commit();  // every third one is an evaluation
    }
    if (s % 3 == 0) return;
    for (std::uint32_t l = store.layers(); l-- > 0;) {
      const auto saved = store.restore(l, rig.stream);
      missing += saved.missing(activation_test::mask) ? 1 : 0;
    }
    rig.write_gradients({.step = s});
    optimizer.group(GroupId{1}).learning_rate = 1e-3f / static_cast<float>(s);
    optimizer.set_frozen(changing, s % 2 == 0);
    optimizer.set_gradient(changing, s % 5 == 0 ? device_span<const float>{} : device_span<const float>{gradient});
    const std::uint64_t made =
        optimizer.step(rig.stream, {.gradient_scale = 0.5f, .max_norm = 1.0f, .skip_nonfinite = true});
    if (s % 4 == 0) look_at(optimizer.report(made));
    if (const auto report = optimizer.try_report(made)) look_at(*report);
  };
  step(1, 6);
  rig.device.synchronize(rig.stream);

  const ArenaUsage hbm = rig.hbm.usage(), host = rig.host.usage();
  const LoggingDevice::Counts counts = rig.device.counts();
  const TransferStats moved = optimizer.stats() + store.stats();
  const std::uint64_t before = allocations;
  for (std::uint64_t s = 2; s <= last_step; ++s) step(s, 1 + s % 6);
  rig.device.synchronize(rig.stream);
  const std::uint64_t after = allocations;
  CHECK(after - before == 0);
  CHECK(rig.device.counts().streams == counts.streams);
  CHECK(rig.device.counts().events == counts.events);
  CHECK(equal(rig.hbm.usage(), hbm));
  CHECK(equal(rig.host.usage(), host));
  CHECK(reports >= 2);  // those of steps 4 and 8, which are waited for
  CHECK(wrong_norms == 0);
  // The mask of a layer that has left its slot, in each of the steps that are no evaluations.
  const std::uint64_t recomputed = std::is_same_v<Policy, OneOfEach> ? store.layers() - depth : 0;
  CHECK(missing == recomputed * (last_step - last_step / 3));
  if (!std::is_same_v<Policy, KeepResident>) CHECK((optimizer.stats() + store.stats()).h2d_bytes > moved.h2d_bytes);

  // A refresh takes nothing either.
  const std::uint64_t before_refresh = allocations;
  optimizer.refresh(rig.stream, Moments::reset);
  optimizer.refresh(rig.stream, Moments::keep);
  rig.device.synchronize(rig.stream);
  const std::uint64_t after_refresh = allocations;
  CHECK(after_refresh - before_refresh == 0);
}

}  // namespace

TEST_CASE("the counter counts, on all threads") {
  REQUIRE(counts_allocations != 0);
  std::uint64_t before = allocations;
  const auto counted = [&] {
    const std::uint64_t now = allocations;
    const bool more = now > before;
    before = now;
    return more;
  };
  int* volatile object = new int{1};  // volatile: a pair of new and delete may be left out
  delete object;
  CHECK(counted());
  void* volatile raw = std::malloc(10);
  raw = std::realloc(raw, 20);
  std::free(raw);
  CHECK(counted());
#if !defined(HBMOFF_TEST_SANITIZED)  // ThreadSanitizer does not tell of it
  raw = std::aligned_alloc(64, 64);
  std::free(raw);
  CHECK(counted());
#endif
  HostDevice device;
  const HostDevice::Stream stream = device.create_stream();
  device.enqueue(stream, [] {});
  device.synchronize(stream);  // the thread's own start may have allocated
  before = allocations;
  device.enqueue(stream, [] {});
  device.synchronize(stream);
  CHECK_FALSE(counted());
  device.enqueue(stream, [] {
    int* volatile there = new int{2};
    delete there;
  });
  device.synchronize(stream);
  CHECK(counted());
}

TEST_CASE("training steps, offloaded") {
  for (const std::uint32_t depth : {1u, 3u}) check_steady(OffloadAll{}, depth);
}
TEST_CASE("training steps, part of all kept, offloaded and recomputed") {
  for (const std::uint32_t depth : {2u, 4u}) check_steady(OneOfEach{}, depth);
}
TEST_CASE("training steps, resident") { check_steady(KeepResident{}, 3); }
