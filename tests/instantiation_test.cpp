// Every public class template is instantiated whole, all its members included: what nobody calls compiles too, and
// shows in the coverage as lines that nobody runs. `checks/instantiated.py` sees that none is forgotten.
#include <cstdint>
#include <type_traits>

#include <doctest/doctest.h>

#include "hbmoff/hbmoff.hpp"

namespace hbmoff {

using TimedObserver = Recorder<HostDevice>::Observer;

template class memory_span<float, DeviceSpace>;
template class memory_span<const bf16, DeviceSpace>;
template class memory_span<std::byte, PinnedSpace>;
template class memory_span<const fp16, PinnedSpace>;

template class CheckedDevice<HostDevice>;
template class Recorder<HostDevice>;
template class Arena<HostDevice, DeviceSpace>;
template class Arena<HostDevice, PinnedSpace>;
template class HbmArena<HostDevice>;
template class PinnedHostArena<HostDevice>;

template struct OffloadPolicyTraits<OffloadOptimizerState>;
template struct KeepLastLayers<OffloadAll>;
template struct RecomputeFirstLayers<KeepLastLayers<>>;
template struct RecomputeMatching<OffloadMatching>;

template struct Mark<HostDevice>;
template class WaitSet<HostDevice>;
template class Home<HostDevice>;
template class Timeline<HostDevice>;
template struct Slot<HostDevice>;
template class SlotPool<HostDevice>;
template struct PagePart<HostDevice>;
template struct PageSpec<HostDevice>;
template class PrefetchScheduler<HostDevice>;
template class PrefetchScheduler<HostDevice, OffloadAll, dynamic_depth, TimedObserver>;
template class PrefetchScheduler<HostDevice, KeepResident>;
template class Lease<PrefetchScheduler<HostDevice>>;

template class PagedAdamW<HostDevice, OffloadAll>;
template class PagedAdamW<HostDevice, OffloadOptimizerState, dynamic_depth, TimedObserver>;
template class PagedAdamW<HostDevice, KeepResident>;
template class ActivationStore<HostDevice, OffloadAll>;
template class ActivationStore<HostDevice, KeepLastLayers<RecomputeMatching<>>, dynamic_depth, TimedObserver>;

}  // namespace hbmoff

TEST_CASE("owners move and are not copied; views are copied") {
  using namespace hbmoff;
  auto moves_only = []<class T>(std::type_identity<T>) {
    return std::is_nothrow_move_constructible_v<T> && !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
  };
  CHECK(moves_only(std::type_identity<HostDevice::Stream>{}));
  CHECK(moves_only(std::type_identity<HostDevice::Event>{}));
  CHECK(moves_only(std::type_identity<HbmArena<HostDevice>::Buffer>{}));
  CHECK(moves_only(std::type_identity<PinnedHostArena<HostDevice>::Buffer>{}));
  CHECK(moves_only(std::type_identity<PrefetchScheduler<HostDevice>::LeaseType>{}));
  CHECK(moves_only(std::type_identity<ActivationStore<HostDevice, OffloadAll>::SavedBundle>{}));
  CHECK(std::is_trivially_copyable_v<device_span<float>>);
  CHECK(std::is_trivially_copyable_v<HostDevice::StreamRef>);
}

TEST_CASE("what a policy decides at compile time is known there") {
  using namespace hbmoff;
  CHECK(OffloadPolicyTraits<KeepResident>::state_always_resident);
  CHECK(OffloadPolicyTraits<KeepResident>::activations_always_kept);
  CHECK(OffloadPolicyTraits<OffloadOptimizerState>::activations_always_kept);
  CHECK_FALSE(OffloadPolicyTraits<OffloadOptimizerState>::state_always_resident);
  CHECK_FALSE(PrefetchScheduler<HostDevice, KeepResident>::pages);
  CHECK(std::is_empty_v<NullObserver>);
}
