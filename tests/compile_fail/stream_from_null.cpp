// expect: (use of deleted function|invokes a deleted|call to deleted constructor)
// A stream is never null.
#include "hbmoff/device/host_device.hpp"

void synchronize(hbmoff::HostDevice& device, [[maybe_unused]] hbmoff::HostDevice::StreamRef stream) {
#ifdef HBMOFF_TWIN
  device.synchronize(stream);
#else
  device.synchronize(hbmoff::HostDevice::StreamRef{nullptr});
#endif
}
