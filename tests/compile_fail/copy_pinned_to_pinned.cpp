// expect: no match(ing)?( member)? function for call to .*copy_async
// Two pinned ranges have no link between them.
#include "hbmoff/device/host_device.hpp"

#ifdef HBMOFF_TWIN
using Target = hbmoff::device_span<std::byte>;
#else
using Target = hbmoff::pinned_span<std::byte>;
#endif

void copy(hbmoff::HostDevice& device, Target to, hbmoff::pinned_span<const std::byte> from,
          hbmoff::HostDevice::StreamRef stream) {
  device.copy_async(to, from, stream);
}
