# Oracles from NVIDIA's headers. Each is optional: without its headers the tests build and report a skip.
find_path(NVFP4_MOE_CUDA_FP4_DIR cuda_fp4.h HINTS "${NVFP4_MOE_CUDA_INCLUDE_DIR}" /usr/local/cuda/include
          ENV CUDA_HOME PATH_SUFFIXES include)
mark_as_advanced(NVFP4_MOE_CUDA_FP4_DIR)
if(NVFP4_MOE_CUDA_FP4_DIR)
  foreach(target test_formats test_formats_long)
    if(TARGET ${target})
      target_include_directories(${target} SYSTEM PRIVATE ${NVFP4_MOE_CUDA_FP4_DIR})
    endif()
  endforeach()
endif()

# A separate executable, so that no other test waits for CuTe to compile.
add_room(test_formats_cute formats ${CMAKE_CURRENT_LIST_DIR}/cute/cute_layout_test.cpp)
set(CUTLASS_DIR "${NVFP4_MOE_CUTLASS_DIR}")
if(NOT CUTLASS_DIR)
  set(CUTLASS_DIR ${PROJECT_SOURCE_DIR}/.deps/cutlass)  # where ./dev setup puts it
endif()
if(EXISTS ${CUTLASS_DIR}/include/cutlass/version.h AND NVFP4_MOE_CUDA_FP4_DIR)
  # cccl: CuTe includes <cuda/std/...>.
  target_include_directories(test_formats_cute SYSTEM PRIVATE ${CUTLASS_DIR}/include ${NVFP4_MOE_CUDA_FP4_DIR}
                                                              ${NVFP4_MOE_CUDA_FP4_DIR}/cccl)
  target_compile_options(test_formats_cute PRIVATE -Wno-conversion)
endif()
# Has constants with the names of quantize_weights_test.cpp's.
set_source_files_properties(formats/quantize_exact_test.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
