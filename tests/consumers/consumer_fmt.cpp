// The formatters are a target of their own; this unit shows that they come with the package.
#include <fmt/format.h>

#include "hbmoff/interop/fmt.hpp"

bool formats() { return fmt::format("{}", hbmoff::Bytes{4096}) == "4.00 KiB"; }
