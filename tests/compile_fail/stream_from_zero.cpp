// expect: (use of deleted function|invokes a deleted|call to deleted constructor)
// There is no default stream: 0 names none.
#include "hbmoff/device/host_device.hpp"

void synchronize(hbmoff::HostDevice& device, [[maybe_unused]] hbmoff::HostDevice::StreamRef stream) {
#ifdef HBMOFF_TWIN
  device.synchronize(stream);
#else
  device.synchronize(hbmoff::HostDevice::StreamRef{0});
#endif
}
