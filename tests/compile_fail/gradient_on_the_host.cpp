// expect: (no match(ing)?( member)? function|cannot convert|could not convert)
// The optimizer reads gradients in HBM.
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/training/paged_adamw.hpp"

#ifdef HBMOFF_TWIN
using Gradient = hbmoff::device_span<const float>;
#else
using Gradient = hbmoff::pinned_span<const float>;
#endif

using Optimizer = hbmoff::PagedAdamW<hbmoff::HostDevice, hbmoff::OffloadOptimizerState>;

auto add(Optimizer& optimizer, hbmoff::device_span<float> weight, Gradient gradient) {
  return optimizer.add({.name = "wte", .role = hbmoff::Role::weight, .count = weight.count()}, weight, gradient);
}
