# hbmoff_add_cuda_kernels(TARGET)
#
# Adds hbmoff's kernels for CudaDevice to a program or library, and what its code needs to include hbmoff/cuda.hpp. Once
# for each program. The project has enabled the language CUDA; which GPUs are compiled for is the target's
# CUDA_ARCHITECTURES (CMAKE_CUDA_ARCHITECTURES), which CMake sets to the compiler's default where nobody does.
function(hbmoff_add_cuda_kernels target)
  find_package(CUDAToolkit REQUIRED)
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(NOT "CUDA" IN_LIST languages)
    message(FATAL_ERROR "hbmoff_add_cuda_kernels: enable_language(CUDA) first")
  endif()
  find_file(HBMOFF_CUDA_KERNELS hbmoff/cuda_kernels.cu REQUIRED NO_CACHE NO_DEFAULT_PATH
    HINTS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../include ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../include)
  target_sources(${target} PRIVATE ${HBMOFF_CUDA_KERNELS})
  set_source_files_properties(${HBMOFF_CUDA_KERNELS} TARGET_DIRECTORY ${target} PROPERTIES LANGUAGE CUDA)
  target_link_libraries(${target} PRIVATE hbmoff::hbmoff CUDA::cudart)
  if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
    target_compile_features(${target} PRIVATE cuda_std_20)
  else()  # a CMake that does not know that of this compiler
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  endif()
endfunction()
