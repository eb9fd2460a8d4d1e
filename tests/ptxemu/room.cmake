# The emulator's run time: libptxemu.so in place of CUDA's, and the same with the faults of planted.def built in.
if(NOT (NVFP4_MOE_EMULATE AND NVFP4_MOE_WITH_CUDA))
  return()
endif()
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/runtime/*.cpp ${CMAKE_CURRENT_LIST_DIR}/cudart/*.cpp
     ${CMAKE_CURRENT_LIST_DIR}/order/*.cpp)
# These have names of their own that others have too.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/runtime/formats.cpp ${CMAKE_CURRENT_LIST_DIR}/runtime/wgmma.cpp
  ${CMAKE_CURRENT_LIST_DIR}/order/barriers.cpp ${CMAKE_CURRENT_LIST_DIR}/order/findings.cpp
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
foreach(name ptxemu ptxemu_planted)
  add_library(${name} SHARED ${sources})
  set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 9)
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_LIST_DIR} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(${name} PRIVATE PTXEMU_SOURCE_DIR="${CMAKE_CURRENT_LIST_DIR}"
                                             PTXEMU_CACHE_DIR="${PROJECT_SOURCE_DIR}/build/ptxemu-cache")
  # The rounding of each operation counts, and so does the mode that it is done in.
  target_compile_options(${name} PRIVATE -march=native -Wall -Wextra -ffp-contract=off -frounding-math -fno-strict-aliasing)
  target_link_libraries(${name} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  # A program that counts its allocations counts none of the device's.
  target_link_options(${name} PRIVATE -static-libstdc++ LINKER:--exclude-libs,libstdc++.a)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET default VISIBILITY_INLINES_HIDDEN OFF
                                           LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
endforeach()
target_compile_definitions(ptxemu_planted PRIVATE PTXEMU_PLANT)
if(TARGET nvfp4-moe)
  emulated_program(nvfp4-moe nvfp4_moe_cli_verbs nvfp4_moe_cli_bench nvfp4_moe_cli_console)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/cutlass/cutlass.cmake)
