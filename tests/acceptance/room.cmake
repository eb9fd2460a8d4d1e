# What a run on a new GPU measures besides the tests (tests/acceptance/acceptance.py): no test, it judges nothing.
if(NOT NVFP4_MOE_WITH_CUDA)
  return()
endif()
add_executable(device_probes ${CMAKE_CURRENT_LIST_DIR}/device_probes.cpp ${CMAKE_CURRENT_LIST_DIR}/seen_kernels.cpp)
target_link_libraries(device_probes PRIVATE test_support nvfp4_moe_cudart)
target_compile_options(device_probes PRIVATE -O1)
# Kernels are seen where the program registers and launches them (seen_kernels.cpp).
target_link_options(device_probes PRIVATE LINKER:--wrap=__cudaRegisterFunction,--wrap=cudaLaunchKernelExC,--wrap=cudaLaunchKernel)
if(NVFP4_MOE_EMULATE)  # for the rehearsal
  emulated_program(device_probes test_support)
endif()
