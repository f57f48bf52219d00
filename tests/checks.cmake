# Tests that read or compile sources instead of running a program. They do not vary with optimisation or sanitizers,
# so builds for those leave them out (HBMOFF_CHECKS).
find_package(Python3 REQUIRED COMPONENTS Interpreter)

set(check_flags "-std=c++20 -Wall -Wextra -Wconversion -Werror")
set(hbmoff_include ${PROJECT_SOURCE_DIR}/include)
get_target_property(fmt_include fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)

# Label `check`: reads sources. Label `compiler`: its outcome may vary with the compiler.
function(hbmoff_add_check name label)
  add_test(NAME ${name} COMMAND Python3::Interpreter ${ARGN})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600 LABELS ${label})
endfunction()

hbmoff_add_check(layering check ${CMAKE_CURRENT_SOURCE_DIR}/checks/layering.py ${hbmoff_include})
hbmoff_add_check(layering.reports_violations check ${CMAKE_CURRENT_SOURCE_DIR}/checks/layering.py --self-check)

hbmoff_add_check(instantiated check ${CMAKE_CURRENT_SOURCE_DIR}/checks/instantiated.py
  ${hbmoff_include} ${CMAKE_CURRENT_SOURCE_DIR}/instantiation_test.cpp)

file(GLOB_RECURSE example_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/*.cpp ${PROJECT_SOURCE_DIR}/examples/*.hpp)
hbmoff_add_check(readme check ${CMAKE_CURRENT_SOURCE_DIR}/checks/readme.py ${PROJECT_SOURCE_DIR}/README.md ${example_sources}
  ${CMAKE_CURRENT_SOURCE_DIR}/consumers/consumer_cuda.cpp)

if(TARGET check_ordering)
  hbmoff_add_check(readme_report check ${CMAKE_CURRENT_SOURCE_DIR}/checks/readme_report.py ${PROJECT_SOURCE_DIR}/README.md
    $<TARGET_FILE:check_ordering>)
endif()

# One version of clang-format decides; a missing one is a failure, not a pass.
find_program(HBMOFF_CLANG_FORMAT clang-format-19)
if(NOT HBMOFF_CLANG_FORMAT)
  message(WARNING "clang-format-19 was not found: the test `format` will fail")
endif()
file(GLOB_RECURSE formatted_sources CONFIGURE_DEPENDS
  ${hbmoff_include}/*.hpp ${hbmoff_include}/*.cuh *.cpp *.hpp
  ${PROJECT_SOURCE_DIR}/bench/*.cpp ${PROJECT_SOURCE_DIR}/bench/*.hpp)
add_test(NAME format COMMAND ${HBMOFF_CLANG_FORMAT} --dry-run -Werror ${formatted_sources} ${example_sources})
set_tests_properties(format PROPERTIES LABELS check)

find_program(HBMOFF_CLANG_TIDY clang-tidy-19)
if(NOT HBMOFF_CLANG_TIDY)
  message(WARNING "clang-tidy-19 was not found: the test `tidy` will fail")
endif()
hbmoff_add_check(tidy check ${CMAKE_CURRENT_SOURCE_DIR}/checks/headers.py tidy
  --compiler ${HBMOFF_CLANG_TIDY} --config ${PROJECT_SOURCE_DIR}/.clang-tidy
  --include ${hbmoff_include} --include ${fmt_include} --flags=-std=c++20)

foreach(what alone hostile twice)
  hbmoff_add_check(headers.${what} compiler ${CMAKE_CURRENT_SOURCE_DIR}/checks/headers.py ${what}
    --compiler ${CMAKE_CXX_COMPILER} --include ${hbmoff_include} --include ${fmt_include} --flags ${check_flags})
endforeach()

file(GLOB sources CONFIGURE_DEPENDS compile_fail/*.cpp)
foreach(source IN LISTS sources)
  get_filename_component(name ${source} NAME_WE)
  hbmoff_add_check(compile_fail.${name} compiler ${CMAKE_CURRENT_SOURCE_DIR}/checks/compile_fail.py ${source}
    --compiler ${CMAKE_CXX_COMPILER} --include ${hbmoff_include} --flags ${check_flags})
endforeach()
# The harness itself: a source that compiles, and one that fails for another reason than the stated one, are reported.
foreach(name compiles wrong_reason broken_twin)
  hbmoff_add_check(compile_fail.reports_${name} compiler ${CMAKE_CURRENT_SOURCE_DIR}/checks/compile_fail.py
    ${CMAKE_CURRENT_SOURCE_DIR}/compile_fail/harness/${name}.cpp
    --compiler ${CMAKE_CXX_COMPILER} --include ${hbmoff_include} --flags ${check_flags})
endforeach()
set_tests_properties(compile_fail.reports_compiles PROPERTIES PASS_REGULAR_EXPRESSION "compiles, and must not")
set_tests_properties(compile_fail.reports_wrong_reason PROPERTIES PASS_REGULAR_EXPRESSION "fails, but not with")
set_tests_properties(compile_fail.reports_broken_twin PROPERTIES PASS_REGULAR_EXPRESSION "the twin does not compile")

# Every call that orders work, left out: built against a copy of the headers in which each can be.
set(mutated ${CMAKE_CURRENT_BINARY_DIR}/mutated)
file(GLOB_RECURSE ordered_headers CONFIGURE_DEPENDS ${hbmoff_include}/*.hpp)
add_custom_command(OUTPUT ${mutated}/ordering_sites.hpp
  COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/mutation/ordering_sites.py ${hbmoff_include} ${mutated}
  DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/mutation/ordering_sites.py ${ordered_headers} VERBATIM)
add_executable(ordering_mutation mutation/ordering_mutation.cpp ${mutated}/ordering_sites.hpp)
target_include_directories(ordering_mutation PRIVATE ${mutated} ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(ordering_mutation PRIVATE doctest_main Threads::Threads)
target_compile_features(ordering_mutation PRIVATE cxx_std_20)
add_test(NAME ordering_mutation COMMAND ordering_mutation)
set_tests_properties(ordering_mutation PROPERTIES TIMEOUT 900)

# Notes of what a launch touches cost no instruction where nobody looks at them.
hbmoff_add_check(annotation_cost check ${PROJECT_SOURCE_DIR}/bench/annotation_cost.py --compiler ${CMAKE_CXX_COMPILER})

# What a user does: hbmoff installed (the tree then moved, so that no path is left in it) and found, and as a subproject.
set(consumers ${CMAKE_CURRENT_SOURCE_DIR}/consumers)
set(consumer_build ${CMAKE_CURRENT_BINARY_DIR}/consumers)
function(hbmoff_add_consumer name)  # and what else run.cmake takes
  add_test(NAME consumer.${name} COMMAND ${CMAKE_COMMAND} -D source=${consumers}/${name} -D binary=${consumer_build}/${name}
    -D generator=${CMAKE_GENERATOR} -D compiler=${CMAKE_CXX_COMPILER} -D hbmoff=${PROJECT_SOURCE_DIR}
    -D installed_from=${PROJECT_BINARY_DIR} ${ARGN} -P ${consumers}/run.cmake)
  set_tests_properties(consumer.${name} PROPERTIES TIMEOUT 600 LABELS check)
endfunction()
hbmoff_add_consumer(find_package)
hbmoff_add_consumer(add_subdirectory)
