// expect: begin
// Host code cannot walk device memory.
#include "hbmoff/device/device.hpp"

#ifdef HBMOFF_TWIN
using Space = hbmoff::PinnedSpace;
#else
using Space = hbmoff::DeviceSpace;
#endif

float sum(hbmoff::memory_span<float, Space> span) {
  float total = 0;
  for (float x : span) total += x;
  return total;
}
