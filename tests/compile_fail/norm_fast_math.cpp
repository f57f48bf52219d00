// expect: its arithmetic is exact and cannot be compiled with -ffast-math
// flags: -ffast-math
// Under -ffast-math the order of a sum is the compiler's; refused.
#include "hbmoff/training/norm.hpp"

double norm(const float* g) { return hbmoff::sum_of_squares(g, 5); }
