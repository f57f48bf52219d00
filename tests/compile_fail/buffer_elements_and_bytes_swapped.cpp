// expect: (no viable conversion|could not convert|cannot convert|no match(ing)?( member)? function)
// An arena takes bytes, and elements are not bytes.
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"

auto take(hbmoff::HbmArena<hbmoff::HostDevice>& arena, std::uint64_t elements, hbmoff::HostDevice::StreamRef stream) {
#ifdef HBMOFF_TWIN
  return arena.allocate(hbmoff::Bytes{elements * sizeof(float)}, "wte", hbmoff::Role::weight, stream);
#else
  return arena.allocate(elements, "wte", hbmoff::Role::weight, stream);
#endif
}
