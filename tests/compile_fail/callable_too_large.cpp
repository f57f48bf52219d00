// expect: the callable captures too much
// A callable lies in the stream's ring, which is of a fixed size: large captures are refused, not put on the heap.
#include <array>

#include "hbmoff/device/host_device.hpp"

#ifdef HBMOFF_TWIN
using Captured = std::array<std::byte, 64>;
#else
using Captured = std::array<std::byte, 1024>;
#endif

void launch(hbmoff::HostDevice& device, hbmoff::HostDevice::StreamRef stream, const Captured& captured) {
  device.enqueue(stream, [captured] { static_cast<void>(captured); });
}
