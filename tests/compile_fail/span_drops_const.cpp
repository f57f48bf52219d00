// expect: (could not convert|no viable conversion|conversion from)
// A span of constant elements does not turn into one that may be written.
#include "hbmoff/device/device.hpp"

#ifdef HBMOFF_TWIN
using Source = float;
#else
using Source = const float;
#endif

hbmoff::device_span<float> convert(hbmoff::device_span<Source> source) { return source; }
