# The executable under test, and its parts for tests that do not start a process.
target_sources(test_cli PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/cli/run_tool.cpp)
target_link_libraries(test_cli PRIVATE nvfp4_moe_cli_verbs)
target_compile_definitions(test_cli PRIVATE NVFP4_MOE_TOOL="$<TARGET_FILE:nvfp4-moe>")
add_dependencies(test_cli nvfp4-moe)
if(NVFP4_MOE_EMULATE AND NVFP4_MOE_WITH_CUDA)  # ranks_test.cpp; emulated/room.cmake and exchange/room.cmake make them
  target_compile_definitions(test_cli PRIVATE NVFP4_MOE_EMULATED_TOOL="$<TARGET_FILE:emulated_nvfp4-moe>"
                                              NVFP4_MOE_FAKE_NCCL="$<TARGET_FILE:fake_nccl_named>")
  add_dependencies(test_cli emulated_nvfp4-moe fake_nccl_named)
endif()
find_package(MPI QUIET COMPONENTS C)
if(MPI_C_FOUND AND NOT NVFP4_MOE_SANITIZE)  # MPI's own leaks would be reported
  add_subdirectory(${PROJECT_SOURCE_DIR}/examples/mpi ${PROJECT_BINARY_DIR}/mpi EXCLUDE_FROM_ALL)
  target_compile_definitions(test_cli PRIVATE NVFP4_MOE_MPI_ADAPTER="$<TARGET_FILE:nvfp4_moe_mpi>"
                                              NVFP4_MOE_MPIEXEC="${MPIEXEC_EXECUTABLE}")
  add_dependencies(test_cli nvfp4_moe_mpi)
endif()
