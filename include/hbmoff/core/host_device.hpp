// The one macro that lets a function run in host and device code.
#pragma once

// CUDA needs the words; to any other compiler they are nothing.
#ifdef __CUDACC__
#define HBMOFF_HOST_DEVICE __host__ __device__
#else
#define HBMOFF_HOST_DEVICE
#endif
