# The CUDA backends: tests that run on any host, and on a machine with a GPU (skipped by name elsewhere) streams, graphs and
# large shapes. tests/steps and tests/layer run the case table on them.
target_link_libraries(test_cuda PRIVATE nvfp4_moe_cudart)
target_link_options(test_cuda PRIVATE LINKER:--wrap=cudaMalloc,--wrap=cudaFree,--wrap=cudaMallocAsync,--wrap=cudaFreeAsync  # memory_test.cpp
                    LINKER:--wrap=cudaStreamQuery,--wrap=cudaSetDevice  # check_end_test.cpp
                    LINKER:--wrap=cudaPointerGetAttributes)  # self_check_test.cpp
add_dependencies(test_cuda fake_nccl)  # ranks_case.h; exchange/room.cmake makes it
target_compile_definitions(test_cuda PRIVATE NVFP4_MOE_FAKE_NCCL="${PROJECT_BINARY_DIR}/tests/fake_nccl/libfake_nccl")
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME cuda/ptxas COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/check/check_ptxas.py
                                 ${PROJECT_BINARY_DIR}/src/CMakeFiles/nvfp4_moe_cuda_objects.dir
                                 ${PROJECT_BINARY_DIR}/src/CMakeFiles/nvfp4_moe_sm80_objects.dir
                                 ${PROJECT_BINARY_DIR}/src/CMakeFiles/nvfp4_moe_sm90_objects.dir
                                 ${PROJECT_BINARY_DIR}/src/CMakeFiles/nvfp4_moe_sm100_objects.dir
                                 ${PROJECT_BINARY_DIR}/src/CMakeFiles/nvfp4_moe_sm120_objects.dir)
set_tests_properties(cuda/ptxas PROPERTIES LABELS cuda)
# Faults for self_check_test.cpp.
add_library(planted_kernels OBJECT ${CMAKE_CURRENT_LIST_DIR}/planted_kernels.cu)
target_include_directories(planted_kernels PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(planted_kernels PRIVATE nvfp4_moe_cudart)
target_compile_options(planted_kernels PRIVATE "-Wno-deprecated-gpu-targets")
set_target_properties(planted_kernels PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
target_sources(test_cuda PRIVATE $<TARGET_OBJECTS:planted_kernels>)
if(TARGET emulated_test_cuda)
  target_sources(emulated_test_cuda PRIVATE $<TARGET_OBJECTS:planted_kernels>)
endif()
