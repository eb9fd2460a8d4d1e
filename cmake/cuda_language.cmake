# Whether the CUDA backends are built, and CMake's language for them.
#
# NVFP4_MOE_CUDA: ON needs nvcc, OFF builds without, AUTO (the default) takes it where it is found. The run time is linked
# statically and the driver is looked for when a device is asked for, so that one build runs with and without a GPU.
if(NVFP4_MOE_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  set(NVFP4_MOE_WITH_CUDA ${CMAKE_CUDA_COMPILER})
else()
  set(NVFP4_MOE_WITH_CUDA ${NVFP4_MOE_CUDA})
endif()
if(NOT NVFP4_MOE_WITH_CUDA)
  return()
endif()

# Real code for each generation and PTX of the last one: nothing is compiled when a layer is opened. The emulator takes
# PTX alone, of the generations that it runs the tests as.
if(NVFP4_MOE_EMULATE)
  set(CMAKE_CUDA_ARCHITECTURES 80-virtual 90-virtual 100-virtual 120-virtual)
elseif(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120)
endif()
enable_language(CUDA)
if(NVFP4_MOE_CUDA STREQUAL "AUTO" AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8: building without CUDA")
  set(NVFP4_MOE_WITH_CUDA OFF)
  return()
endif()
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 12.8 REQUIRED)

# CUDA's run time, or the emulator's in its place.
add_library(nvfp4_moe_cudart INTERFACE)
if(NVFP4_MOE_EMULATE)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} --no-compress")  # its translator reads PTX as text
  target_include_directories(nvfp4_moe_cudart INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(nvfp4_moe_cudart INTERFACE ptxemu)
else()
  target_link_libraries(nvfp4_moe_cudart INTERFACE CUDA::cudart_static)
endif()
