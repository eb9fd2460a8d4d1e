# CUTLASS's Blackwell kernels on the emulator (./dev emulate --cutlass). Nothing here is built unless it is named: each
# kernel takes a minute and up to 5 GiB, so one is compiled at a time.
set(CUTLASS_DIR "${NVFP4_MOE_CUTLASS_DIR}")
if(NOT CUTLASS_DIR)
  set(CUTLASS_DIR ${PROJECT_SOURCE_DIR}/.deps/cutlass)  # where ./dev setup puts it
endif()
if(NOT EXISTS ${CUTLASS_DIR}/include/cutlass/version.h)
  return()
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS cutlass=1)
set(objects "")
foreach(generation 100 120)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/sm${generation}_*.cu)
  add_library(ptxemu_cutlass_sm${generation} OBJECT EXCLUDE_FROM_ALL ${sources})
  # CUTLASS has tensormap.replace for the targets of one architecture (a) alone. A device assert is a call, and
  # printf besides.
  set_target_properties(ptxemu_cutlass_sm${generation} PROPERTIES CUDA_ARCHITECTURES ${generation}a-virtual
    CUDA_STANDARD 17 JOB_POOL_COMPILE cutlass)
  target_include_directories(ptxemu_cutlass_sm${generation} PRIVATE ${CMAKE_CURRENT_LIST_DIR} SYSTEM PRIVATE
    ${CUTLASS_DIR}/include ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(ptxemu_cutlass_sm${generation} PRIVATE NDEBUG)
  target_compile_options(ptxemu_cutlass_sm${generation} PRIVATE --expt-relaxed-constexpr)
  list(APPEND objects $<TARGET_OBJECTS:ptxemu_cutlass_sm${generation}>)
endforeach()

add_library(ptxemu_cutlass_check OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/check.cpp
  ${CMAKE_CURRENT_LIST_DIR}/judge.cpp ${CMAKE_CURRENT_LIST_DIR}/problem.cpp)
# The judge rounds where it says so.
target_compile_options(ptxemu_cutlass_check PRIVATE -Wall -Wextra -O2 -ffp-contract=off)
target_include_directories(ptxemu_cutlass_check SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})

add_executable(test_ptxemu_cutlass EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/cutlass_test.cpp ${objects}
  $<TARGET_OBJECTS:ptxemu_cutlass_check>)
target_compile_options(test_ptxemu_cutlass PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -O1>)
target_link_libraries(test_ptxemu_cutlass PRIVATE ptxemu GTest::gtest_main)

add_executable(ptxemu_cutlass_planted EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/planted_fault.cpp ${objects}
  $<TARGET_OBJECTS:ptxemu_cutlass_check>)
target_link_libraries(ptxemu_cutlass_planted PRIVATE ptxemu_planted)
# The emulator stands in for CUDA's own run time.
set_target_properties(test_ptxemu_cutlass ptxemu_cutlass_planted PROPERTIES CUDA_RUNTIME_LIBRARY None)
