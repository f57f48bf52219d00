// expect: resident memory has no slot to swap
// Where nothing is paged there is no slot whose memory could be handed over.
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"

#ifdef HBMOFF_TWIN
using Scheduler = hbmoff::PrefetchScheduler<hbmoff::HostDevice, hbmoff::OffloadAll>;
#else
using Scheduler = hbmoff::PrefetchScheduler<hbmoff::HostDevice, hbmoff::KeepResident>;
#endif

using Buffer = hbmoff::HbmArena<hbmoff::HostDevice>::Buffer;

Buffer take(Scheduler::LeaseType& lease, Buffer replacement) { return lease.donate(std::move(replacement)); }
