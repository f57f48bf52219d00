// expect: (cannot convert|no viable conversion)
// A byte count does not turn into a plain number by itself.
#include "hbmoff/core/units.hpp"

#ifdef HBMOFF_TWIN
std::uint64_t count(hbmoff::Bytes bytes) { return bytes.count(); }
#else
std::uint64_t count(hbmoff::Bytes bytes) { return bytes; }
#endif
