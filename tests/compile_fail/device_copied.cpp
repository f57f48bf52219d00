// expect: (use of deleted function|call to deleted constructor)
// A device is one place; arenas and optimizers refer to it.
#include "hbmoff/device/host_device.hpp"

void use(hbmoff::HostDevice& device) {
#ifdef HBMOFF_TWIN
  hbmoff::HostDevice& other = device;
#else
  hbmoff::HostDevice other = device;
#endif
  static_cast<void>(other.lost());
}
