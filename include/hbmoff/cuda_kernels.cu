// The one translation unit for nvcc that a program with CudaDevice needs: the library's kernels.
#include "hbmoff/training/adamw_kernels.cuh"

#define HBMOFF_INSTANTIATE(Kernel)                                    \
  template void hbmoff::launch_kernel<hbmoff::adamw_kernels::Kernel>( \
      hbmoff::CudaDevice&, const hbmoff::adamw_kernels::Kernel&, hbmoff::CudaDevice::StreamRef, std::source_location)

HBMOFF_INSTANTIATE(SetTensors);
HBMOFF_INSTANTIATE(SetSlices);
HBMOFF_INSTANTIATE(InitialisePage);
HBMOFF_INSTANTIATE(LeafSums);
HBMOFF_INSTANTIATE(JoinLeaves);
HBMOFF_INSTANTIATE(DecideStep);
HBMOFF_INSTANTIATE(Coefficients);
HBMOFF_INSTANTIATE(UpdatePage);
