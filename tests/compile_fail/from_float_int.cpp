// expect: deleted function
// An fp32 is converted into element types only.
#include "hbmoff/core/dtype.hpp"

#ifdef HBMOFF_TWIN
using T = hbmoff::fp16;
#else
using T = double;
#endif

auto convert(float x) { return hbmoff::from_float<T>(x); }
