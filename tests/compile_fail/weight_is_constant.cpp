// expect: the weight is written
// The optimizer writes the weight.
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/training/paged_adamw.hpp"

#ifdef HBMOFF_TWIN
using Weight = float;
#else
using Weight = const float;
#endif

using Optimizer = hbmoff::PagedAdamW<hbmoff::HostDevice, hbmoff::OffloadOptimizerState>;

auto add(Optimizer& optimizer, hbmoff::device_span<Weight> weight, hbmoff::device_span<const float> gradient) {
  return optimizer.add({.name = "wte", .role = hbmoff::Role::weight, .count = weight.count()}, weight, gradient);
}
