# Decides whether the CUDA backends are built, and enables CMake's language CUDA.
#
# NVFP4_MOE_CUDA: ON requires nvcc, OFF builds without CUDA, AUTO (the default) builds it if nvcc is found. The run time is
# linked statically, and the driver is loaded at the first use of a device, so one build runs with and without a GPU.
if(NVFP4_MOE_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  set(NVFP4_MOE_WITH_CUDA ${CMAKE_CUDA_COMPILER})
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # so that the next run searches again
  endif()
  find_program(NVFP4_MOE_NVCC nvcc)
  mark_as_advanced(NVFP4_MOE_NVCC)
  if(NOT CMAKE_CUDA_COMPILER AND NVFP4_MOE_NVCC)
    message(WARNING "${NVFP4_MOE_NVCC} compiles nothing here (CMakeFiles/CMakeError.log has its messages): building without "
                    "CUDA. -DNVFP4_MOE_CUDA=ON makes this an error, OFF hides this warning")
  endif()
else()
  set(NVFP4_MOE_WITH_CUDA ${NVFP4_MOE_CUDA})
endif()
if(NOT NVFP4_MOE_WITH_CUDA)
  return()
endif()

# Machine code for each generation and PTX of the last one, so that nothing is compiled when a layer is opened. The emulator
# needs the PTX of each generation. To save compile time, a build for it makes machine code of the kernels that all
# generations share only for 10.0, and only PTX of files whose registers need no check. ./dev test --long makes all
# machine code, and ./dev gpu that of its GPU.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  if(NVFP4_MOE_EMULATE)
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual 90-virtual 100)  # 12.0 runs the PTX of 10.0
    set(NVFP4_MOE_PTX_ARCHITECTURES 80-virtual 90-virtual 100-virtual)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120)
  endif()
endif()
# On a Blackwell device the kernels that all generations share write FP4 operands, which PTX of an older generation does not:
# compiled there from such PTX they would give wrong numbers and no error.
set(older_ptx "")
set(has_100 FALSE)
# Thor (11.0) runs PTX of older generations, but no machine code of theirs: NVFP4_MOE_CODE_FOR_11. Its own code
# (NVFP4_MOE_THOR) is compiled only if 110 is listed, since it is a family by itself and no default build's compile time
# should grow for it.
set(NVFP4_MOE_CODE_FOR_11 FALSE)
set(NVFP4_MOE_THOR FALSE)
foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})
  if(architecture MATCHES "^110[af]?(-real|-virtual)?$")
    set(NVFP4_MOE_THOR TRUE)
  elseif(architecture MATCHES "^(all|all-major)$|^([89][0-9]|10[0-9])(-virtual)?$")
    set(NVFP4_MOE_CODE_FOR_11 TRUE)
  endif()
  if(architecture MATCHES "^(all|all-major|native)$" OR architecture MATCHES "^10[0-9]")
    set(has_100 TRUE)
  elseif(architecture MATCHES "^[1-9][0-9](-virtual)?$")
    set(older_ptx ${architecture})
  endif()
endforeach()
if(older_ptx AND NOT has_100)
  string(REGEX REPLACE "-virtual" "" older ${older_ptx})
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected 100 too, since Blackwell GPUs would run the PTX of ${older_ptx}, which has no "
                      "kernels for them, got ${CMAKE_CUDA_ARCHITECTURES}: add 100, or write ${older}-real for machine code only")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native" AND "${CMAKE_CUDA_ARCHITECTURES_NATIVE}" MATCHES "110")
  set(NVFP4_MOE_THOR TRUE)
endif()
if(NVFP4_MOE_THOR)
  set(NVFP4_MOE_CODE_FOR_11 TRUE)
endif()
# sm100's and sm120's kernels are compiled for architecture families, and sm100's need PTX 8.8. Both require CUDA 12.9.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
  set(too_old "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.9, which the kernels of sm100 need (PTX 8.8)")
  if(NVFP4_MOE_CUDA STREQUAL "AUTO")
    message(WARNING "${too_old}: building without CUDA")
    set(NVFP4_MOE_WITH_CUDA OFF)
    return()
  endif()
  message(FATAL_ERROR "${too_old}: install CUDA 12.9 or later and set CMAKE_CUDA_COMPILER to its nvcc, or configure with "
                      "-DNVFP4_MOE_CUDA=OFF")
endif()
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's option
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 12.9 REQUIRED)

add_library(nvfp4_moe_cudart INTERFACE)
target_link_libraries(nvfp4_moe_cudart INTERFACE CUDA::cudart_static)
if(NVFP4_MOE_EMULATE)
  set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} --no-compress")  # the emulator reads PTX as text
endif()
