// expect: (use of deleted function|call to deleted constructor)
// A buffer has one owner.
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"

using Buffer = hbmoff::HbmArena<hbmoff::HostDevice>::Buffer;

Buffer other(Buffer& buffer) {
#ifdef HBMOFF_TWIN
  return std::move(buffer);
#else
  return buffer;
#endif
}
