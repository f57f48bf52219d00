// expect: (use of deleted function|call to implicitly-deleted copy constructor|call to deleted constructor)
// An event has one owner.
#include "hbmoff/device/host_device.hpp"

hbmoff::HostDevice::Event other(hbmoff::HostDevice::Event& event) {
#ifdef HBMOFF_TWIN
  return std::move(event);
#else
  return event;
#endif
}
