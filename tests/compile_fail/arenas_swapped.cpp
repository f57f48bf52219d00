// expect: (no match(ing)? function|no viable constructor|class template argument deduction failed|no match)
// The optimizer takes HBM first and its home second; the two arenas are of different types.
#include "hbmoff/training/paged_adamw.hpp"

#include "hbmoff/device/host_device.hpp"

void train(hbmoff::HbmArena<hbmoff::HostDevice>& hbm, hbmoff::PinnedHostArena<hbmoff::HostDevice>& host) {
#ifdef HBMOFF_TWIN
  hbmoff::PagedAdamW optimizer{hbm, host, hbmoff::OffloadOptimizerState{}};
#else
  hbmoff::PagedAdamW optimizer{host, hbm, hbmoff::OffloadOptimizerState{}};
#endif
}
