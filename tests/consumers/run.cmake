# Configures, builds and runs one consumer project from scratch.
#
#   cmake -D source=DIR -D binary=DIR -D generator=NAME -D compiler=CXX -D hbmoff=SOURCE_DIR -D installed_from=BUILD_DIR
#     [-D options=OPTION,OPTION...] [-D runner=PROG] -P run.cmake
string(REPLACE "," ";" options "${options}")
file(REMOVE_RECURSE ${binary})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result})")
  endif()
endfunction()

get_filename_component(name ${source} NAME)
if(name MATCHES "^find_package")
  run(${CMAKE_COMMAND} --install ${installed_from} --prefix ${binary}/first_place)
  file(RENAME ${binary}/first_place ${binary}/moved)
  file(GLOB_RECURSE package_files ${binary}/moved/share/cmake/*)
  if(NOT package_files)
    message(FATAL_ERROR "no package files were installed")
  endif()
  foreach(file IN LISTS package_files)
    file(STRINGS ${file} absolute_paths REGEX "first_place|${hbmoff}/|${installed_from}")
    if(absolute_paths)
      message(FATAL_ERROR "${file} holds a path of the build: ${absolute_paths}")
    endif()
  endforeach()
  set(where -D CMAKE_PREFIX_PATH=${binary}/moved)
else()
  set(where -D HBMOFF_SOURCE_DIR=${hbmoff})
endif()

run(${CMAKE_COMMAND} -S ${source} -B ${binary}/build -G ${generator} -D CMAKE_CXX_COMPILER=${compiler}
  -D CMAKE_CXX_FLAGS=-O1 ${where} ${options})
run(${CMAKE_COMMAND} --build ${binary}/build)
run(${runner} ${binary}/build/consumer)
