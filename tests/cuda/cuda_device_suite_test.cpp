// The test cases that every device has to pass, on CudaDevice. (On HostDevice: tests/device_suite_test.cpp.)
#include "hbmoff/cuda.hpp"
#include "hbmoff/device/checked_device.hpp"

#define HBMOFF_SUITE_DEVICES hbmoff::CudaDevice, hbmoff::CheckedDevice<hbmoff::CudaDevice>
#include "support/device_suite.hpp"
