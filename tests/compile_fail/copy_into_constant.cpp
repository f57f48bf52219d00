// expect: no match(ing)?( member)? function for call to .*copy_async
// What a span of constants refers to is not written.
#include "hbmoff/device/host_device.hpp"

#ifdef HBMOFF_TWIN
using Target = hbmoff::device_span<std::byte>;
#else
using Target = hbmoff::device_span<const std::byte>;
#endif

void copy(hbmoff::HostDevice& device, Target to, hbmoff::pinned_span<const std::byte> from,
          hbmoff::HostDevice::StreamRef stream) {
  device.copy_async(to, from, stream);
}
