// expect: (could not convert|no viable conversion|conversion from)
// Pinned memory does not turn into device memory.
#include "hbmoff/device/device.hpp"

#ifdef HBMOFF_TWIN
using Source = hbmoff::device_span<float>;
#else
using Source = hbmoff::pinned_span<float>;
#endif

hbmoff::device_span<const float> convert(Source source) { return source; }
