// expect: (use of deleted function|call to (implicitly-)?deleted)
// A lease has one holder.
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"

using Scheduler = hbmoff::PrefetchScheduler<hbmoff::HostDevice, hbmoff::OffloadAll>;
using Lease = Scheduler::LeaseType;

Lease other(Lease& lease) {
#ifdef HBMOFF_TWIN
  return std::move(lease);
#else
  return lease;
#endif
}
