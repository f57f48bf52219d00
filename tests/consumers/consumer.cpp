// A user's program, built against an installed hbmoff and against hbmoff as a subproject.
#include "hbmoff/core/units.hpp"
#include "hbmoff/core/version.hpp"

int main() { return hbmoff::version_major == 0 && hbmoff::Bytes{4096}.count() == 4096 ? 0 : 1; }
