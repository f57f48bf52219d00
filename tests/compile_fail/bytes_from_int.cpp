// expect: (could not convert|no viable conversion|conversion from)
// A plain number is no byte count: elements and bytes cannot be swapped.
#include "hbmoff/core/units.hpp"

#ifdef HBMOFF_TWIN
hbmoff::Bytes page() { return hbmoff::Bytes{4096}; }
#else
hbmoff::Bytes page() { return 4096; }
#endif
