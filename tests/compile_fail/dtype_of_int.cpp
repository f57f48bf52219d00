// expect: not an element type
// Only element types have a DType.
#include "hbmoff/core/dtype.hpp"

#ifdef HBMOFF_TWIN
using T = hbmoff::bf16;
#else
using T = int;
#endif

auto dtype = hbmoff::dtype_of<T>;
