# What hbmoff's own tests, examples and benchmarks are built with; never part of the interface target.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(HBMOFF_CCACHE ccache)
  mark_as_advanced(HBMOFF_CCACHE)
  if(HBMOFF_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${HBMOFF_CCACHE})
  endif()
endif()
set(CMAKE_CXX_EXTENSIONS OFF)

# Warnings, as errors where CMAKE_COMPILE_WARNING_AS_ERROR says so (every preset does).
add_library(hbmoff_developer INTERFACE)
target_compile_options(hbmoff_developer INTERFACE -Wall -Wextra -Wconversion)
target_link_libraries(hbmoff_developer INTERFACE hbmoff)

option(HBMOFF_CHECKS "Add the tests that read or compile sources: headers, layering, compile-fail, consumers, format" ON)
if(HBMOFF_TESTS)
  find_package(fmt REQUIRED)  # here, in the scope that hbmoff::fmt was made in
endif()
