# Measurements on a new GPU, in addition to the tests (tests/acceptance/acceptance.py). Not a test.
if(NOT NVFP4_MOE_WITH_CUDA)
  return()
endif()
add_executable(device_probes ${CMAKE_CURRENT_LIST_DIR}/device_probes.cpp ${CMAKE_CURRENT_LIST_DIR}/seen_kernels.cpp)
target_link_libraries(device_probes PRIVATE test_support nvfp4_moe_cudart)
target_compile_options(device_probes PRIVATE -O1)
# Wraps the functions that register and launch kernels, to record them (seen_kernels.cpp).
target_link_options(device_probes PRIVATE LINKER:--wrap=__cudaRegisterFunction,--wrap=cudaLaunchKernelExC,--wrap=cudaLaunchKernel)
if(NVFP4_MOE_EMULATE)  # for the rehearsal
  emulated_program(device_probes test_support)
endif()
