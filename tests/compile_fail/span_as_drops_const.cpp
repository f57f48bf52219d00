// expect: as<U>\(\) cannot drop const
// Looking at constant bytes as elements keeps them constant.
#include "hbmoff/device/device.hpp"

#ifdef HBMOFF_TWIN
using Target = const float;
#else
using Target = float;
#endif

auto convert(hbmoff::device_span<const std::byte> source) { return source.as<Target>(); }
