// expect: operator\[\]
// Host code cannot index device memory.
#include "hbmoff/device/device.hpp"

#ifdef HBMOFF_TWIN
using Space = hbmoff::PinnedSpace;
#else
using Space = hbmoff::DeviceSpace;
#endif

float first(hbmoff::memory_span<float, Space> span) { return span[0]; }
