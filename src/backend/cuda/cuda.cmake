# The CUDA part of the library: object libraries of their own, since architectures and flags are a target's.
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

# Real code for each generation and PTX of the last one: nothing is compiled when a layer is opened.
if(NOT CMAKE_CUDA_ARCHITECTURES)
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

# -fmad=false: the roundings that the contract names, and no others. -v: registers and spills, kept beside each object for
# the test that reads them.
function(add_cuda_objects target folder)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/backend/${folder}/*.cu
                                      ${PROJECT_SOURCE_DIR}/src/backend/${folder}/*.cpp)
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(${target} PRIVATE nvfp4_moe_flags CUDA::cudart_static)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-Xptxas=-v;-Xcompiler=-Wall,-Wextra;-Wno-deprecated-gpu-targets>")
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
    RULE_LAUNCH_COMPILE "sh ${PROJECT_SOURCE_DIR}/scripts/keep_compiler_report.sh <OBJECT>")
endfunction()

add_cuda_objects(nvfp4_moe_cuda_objects cuda)
add_cuda_objects(nvfp4_moe_sm90_objects sm90)  # wgmma is in the architecture-specific instruction set only
set_target_properties(nvfp4_moe_sm90_objects PROPERTIES CUDA_ARCHITECTURES 90a-real)
# A device assert is a function call, and ptxas serializes wgmma around calls.
target_compile_definitions(nvfp4_moe_sm90_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:NDEBUG>)
if(NVFP4_MOE_RACECHECK)
  target_compile_definitions(nvfp4_moe_sm90_objects PRIVATE NVFP4_MOE_RACECHECK)
endif()
