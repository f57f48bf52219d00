// The test cases that every device has to pass, without a GPU. (With one: tests/cuda/cuda_device_suite_test.cpp.)
#include "hbmoff/device/checked_device.hpp"
#include "hbmoff/device/host_device.hpp"

#define HBMOFF_SUITE_DEVICES hbmoff::HostDevice, hbmoff::CheckedDevice<hbmoff::HostDevice>
#include "support/device_suite.hpp"
