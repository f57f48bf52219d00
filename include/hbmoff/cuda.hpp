// The whole library and its CUDA device. Needs CUDA's headers; for host compilers and nvcc alike. The program also needs
// the library's kernels, once: see `launch_kernel` of device/cuda_device.hpp.
#pragma once

#include "hbmoff/device/cuda_device.hpp"
#include "hbmoff/hbmoff.hpp"
