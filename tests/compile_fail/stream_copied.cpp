// expect: (use of deleted function|call to implicitly-deleted copy constructor|call to deleted constructor)
// A stream has one owner.
#include "hbmoff/device/host_device.hpp"

hbmoff::HostDevice::Stream other(hbmoff::HostDevice::Stream& stream) {
#ifdef HBMOFF_TWIN
  return std::move(stream);
#else
  return stream;
#endif
}
