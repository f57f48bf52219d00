// expect: its arithmetic is exact and cannot be compiled with -ffast-math
// flags: -ffinite-math-only
// Part of -ffast-math alone is refused too.
#include "hbmoff/training/adamw.hpp"

float update(float w) { return hbmoff::adamw_update({0, 0, w}, 1, hbmoff::AdamWCoefficients{}).w; }
