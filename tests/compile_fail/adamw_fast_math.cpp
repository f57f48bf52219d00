// expect: its arithmetic is exact and cannot be compiled with -ffast-math
// flags: -ffast-math
// Under -ffast-math the update would differ between places; it refuses instead.
#include "hbmoff/training/adamw.hpp"

float update(float w) { return hbmoff::adamw_update({0, 0, w}, 1, hbmoff::AdamWCoefficients{}).w; }
