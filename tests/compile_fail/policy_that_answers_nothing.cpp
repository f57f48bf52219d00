// expect: (constraints not satisfied|no matching function for call to .use.)
// A policy answers at least one of the two questions; a misspelt member is no answer.
#include "hbmoff/paging/offload_policy.hpp"

struct Policy {
#ifdef HBMOFF_TWIN
  hbmoff::Tier home(const hbmoff::TensorInfo&) const { return hbmoff::Tier::hbm; }
#else
  hbmoff::Tier homes(const hbmoff::TensorInfo&) const { return hbmoff::Tier::hbm; }
#endif
};

template <hbmoff::OffloadPolicy P>
void use(P) {}

void ask() { use(Policy{}); }
