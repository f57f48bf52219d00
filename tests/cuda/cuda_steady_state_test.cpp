// After its first step a training on CudaDevice asks the runtime for no memory, no stream and no event, and waits for
// nothing. The stand-in for the runtime counts: this is built only where there is one.
#include <doctest/doctest.h>

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "hbmoff/cuda.hpp"
#include "support/adamw_model.hpp"

using namespace hbmoff;

namespace {

// The stand-in's counters, up to the last one that is looked at here: cudart_standin.h.
struct Counters {
  std::uint64_t kernels, instructions, approx_instructions, copies_h2d, bytes_h2d, copies_d2h, bytes_d2h, copies_d2d,
      bytes_d2d, copies_h2h, bytes_h2h, memsets, bytes_memset, pageable_async_copies, stream_syncs, event_syncs,
      device_syncs, host_blocking_calls, device_allocs, device_frees, pinned_allocs, pinned_frees, host_registers,
      host_unregisters, streams_created, streams_destroyed, events_created, events_destroyed;
};
using Read = void (*)(Counters*, std::size_t);

Read reader() { return reinterpret_cast<Read>(dlsym(RTLD_DEFAULT, "cudart_standin_counters_read")); }
Counters counters() {
  Counters now{};
  reader()(&now, sizeof now);
  return now;
}

template <class Policy, std::uint32_t Depth>
void check_steady(Policy policy) {
  constexpr std::uint32_t layers = 6;
  const std::vector<adamw_test::TensorSpec> specs{{"a", 900, DType::fp32, DType::fp32, 0},
                                                  {"b", 500, DType::bf16, DType::fp32, 0},
                                                  {"c", 300, DType::bf16, DType::bf16, 0}};
  adamw_test::Rig<CudaDevice> rig{specs};
  PagedAdamW<CudaDevice, Policy, Depth> optimizer{rig.hbm, rig.host, policy, {.page = 1_KiB, .fill_evicted = true}};
  rig.add_all(optimizer);
  const BundleLayout layout{{{.info = {.name = "x", .count = 1000}, .checkpoint = true}}};
  ActivationStore<CudaDevice, Policy, Depth> store{rig.hbm, rig.host, policy, layers, layout};
  const auto step = [&](std::uint64_t s) {
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = store.save(l, rig.stream);
      rig.device.fill_async(saved.template tensor<float>(0).bytes(), static_cast<std::byte>(s), rig.stream);
      saved.commit();
    }
    for (std::uint32_t l = layers; l-- > 0;) static_cast<void>(store.restore(l, rig.stream));
    optimizer.group(GroupId{0}).learning_rate = 1e-3f / static_cast<float>(s);
    optimizer.step(rig.stream, {.max_norm = 1.0f, .skip_nonfinite = true});
  };
  rig.write_gradients({.seed = 1, .step = 1});
  step(1);
  rig.device.synchronize(rig.stream);
  const Counters before = counters();
  for (std::uint64_t s = 2; s <= 5; ++s) step(s);
  const Counters after = counters();
  rig.device.synchronize(rig.stream);
  CHECK(after.host_blocking_calls == before.host_blocking_calls);
  CHECK(after.stream_syncs == before.stream_syncs);
  CHECK(after.event_syncs == before.event_syncs);
  CHECK(after.device_syncs == before.device_syncs);
  CHECK(after.pageable_async_copies == before.pageable_async_copies);
  CHECK(after.device_allocs == before.device_allocs);
  CHECK(after.device_frees == before.device_frees);
  CHECK(after.pinned_allocs == before.pinned_allocs);
  CHECK(after.pinned_frees == before.pinned_frees);
  CHECK(after.host_registers == before.host_registers);
  CHECK(after.host_unregisters == before.host_unregisters);
  CHECK(after.streams_created == before.streams_created);
  CHECK(after.streams_destroyed == before.streams_destroyed);
  CHECK(after.events_created == before.events_created);
  CHECK(after.events_destroyed == before.events_destroyed);
  CHECK(counters().kernels > before.kernels);
  CHECK(optimizer.report(5).applied);
  CHECK(counters().host_blocking_calls > after.host_blocking_calls);  // the counter counts
}

}  // namespace

TEST_CASE("training steps, offloaded") {
  check_steady<OffloadAll, 1>({});
  check_steady<OffloadAll, 3>({});
}
TEST_CASE("training steps, resident") { check_steady<KeepResident, 3>({}); }
