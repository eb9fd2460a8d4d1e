# The CUDA rooms. Architectures and flags are a target's, so that each folder below is one object library.
#
# -fmad=false: the roundings that the contract names, and no others. -v: registers and spills, kept beside each object
# for the test that reads them.

# cuda_batches(NAME OUT source...): the sources, up to twelve .cu files in one, because nvcc parses the headers again for each
# file and architecture. For builds that compile everything once, as those for the emulator do: an edit of one file compiles
# its whole batch again. CMake's own UNITY_BUILD takes CUDA from 3.31 on. Names in the unnamed namespaces of a room's files
# differ, as they do where CMake batches C++.
function(cuda_batches name out)
  set(rest ${ARGN})
  list(FILTER rest EXCLUDE REGEX "\\.cu$")
  set(kernels ${ARGN})
  list(FILTER kernels INCLUDE REGEX "\\.cu$")
  list(LENGTH kernels count)
  math(EXPR batches "(${count} + 11) / 12")
  set(index 0)
  foreach(kernel ${kernels})
    math(EXPR batch "${index} % ${batches}")  # neighbours cost alike: they go to different batches
    string(APPEND text_${batch} "#include \"${kernel}\"\n")
    math(EXPR index "${index} + 1")
  endforeach()
  foreach(batch RANGE 1 ${batches})
    math(EXPR batch "${batch} - 1")
    set(file ${CMAKE_CURRENT_BINARY_DIR}/cuda_batches/${name}_${batch}.cu)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text_${batch}}" @ONLY)
    list(APPEND rest ${file})
  endforeach()
  set(${out} ${rest} PARENT_SCOPE)
endfunction()

# cuda_objects(ROOM NAME BATCHES ARCHITECTURES source...): the object library nvfp4_moe_NAME_objects of a room. Without
# architectures, it takes CMake's.
function(cuda_objects room name batches architectures)
  set(sources ${ARGN})
  if(batches AND NVFP4_MOE_EMULATE)
    cuda_batches(${name} sources ${sources})
  endif()
  add_library(nvfp4_moe_${name}_objects OBJECT ${sources})
  target_link_libraries(nvfp4_moe_${name}_objects PRIVATE nvfp4_moe_flags nvfp4_moe_${room}_headers
                                                          nvfp4_moe_cudart)
  target_compile_options(nvfp4_moe_${name}_objects PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-Xptxas=-v;-Xcompiler=-Wall,-Wextra;-Wno-deprecated-gpu-targets>")
  set_target_properties(nvfp4_moe_${name}_objects PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
  set(report ${PROJECT_SOURCE_DIR}/tools/check/keep_compiler_report.sh)  # not in the source distribution
  if(EXISTS ${report})
    set_target_properties(nvfp4_moe_${name}_objects PROPERTIES RULE_LAUNCH_COMPILE "sh ${report} <OBJECT>")
  endif()
  if(architectures)
    set_target_properties(nvfp4_moe_${name}_objects PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  endif()
  set_property(GLOBAL APPEND PROPERTY NVFP4_MOE_ROOM_OBJECTS $<TARGET_OBJECTS:nvfp4_moe_${name}_objects>)
endfunction()

# UNCHECKED: files whose registers tools/check/check_ptxas.py checks only in ./dev test --long. ./dev test makes only PTX of
# them, because ptxas takes as long as the rest of nvcc.
function(cuda_room name)
  cmake_parse_arguments(ROOM "BATCHES" "" "FOLDERS;USES;ARCHITECTURES;UNCHECKED" ${ARGN})
  room_headers(${name} HEADERS ${ROOM_FOLDERS} USES ${ROOM_USES})
  set(sources "")
  foreach(folder ${ROOM_FOLDERS})
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cu
                                              ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND sources ${found})
  endforeach()
  if(ROOM_UNCHECKED AND NVFP4_MOE_PTX_ARCHITECTURES)
    list(TRANSFORM ROOM_UNCHECKED PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    list(REMOVE_ITEM sources ${ROOM_UNCHECKED})
    cuda_objects(${name} ${name}_ptx "${ROOM_BATCHES}" "${NVFP4_MOE_PTX_ARCHITECTURES}" ${ROOM_UNCHECKED})
  endif()
  cuda_objects(${name} ${name} "${ROOM_BATCHES}" "${ROOM_ARCHITECTURES}" ${sources})
endfunction()

set(unchecked device/measure device/sample_token exchange/peer_sums exchange/ranks pack/fp8_pack pack/pack pack/replace
              pack/source_check steps/format steps/linear steps/scale_hidden)
list(TRANSFORM unchecked REPLACE "(.+)" "backend/cuda/\\1.cu")
cuda_room(cuda FOLDERS backend/cuda USES backend BATCHES UNCHECKED ${unchecked})
set(kernels_id ${CMAKE_CURRENT_BINARY_DIR}/kernels_id.cpp)
file(GLOB_RECURSE kernel_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/backend/cuda/*
                                                   ${CMAKE_CURRENT_SOURCE_DIR}/backend/sm*/* ${CMAKE_CURRENT_SOURCE_DIR}/core/*.h)
set(check_sources backend/*.h backend/*.cpp moe/self_check* moe/exact_layer*)
list(TRANSFORM check_sources PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
file(GLOB check_sources CONFIGURE_DEPENDS ${check_sources})
add_custom_command(OUTPUT ${kernels_id} DEPENDS ${kernel_sources} ${check_sources} ${PROJECT_SOURCE_DIR}/cmake/kernels_id.cmake VERBATIM
                   COMMAND ${CMAKE_COMMAND} -D OUT=${kernels_id} -D SRC=${CMAKE_CURRENT_SOURCE_DIR}
                           -D COMPILER=${CMAKE_CUDA_COMPILER_VERSION} -P ${PROJECT_SOURCE_DIR}/cmake/kernels_id.cmake)
target_sources(nvfp4_moe_cuda_objects PRIVATE ${kernels_id})
cuda_room(sm80 FOLDERS backend/sm80 USES cuda)
# Rooms of one architecture hold its machine code alone; for the emulator its PTX besides.
set(code -real)
if(NVFP4_MOE_EMULATE AND NVFP4_MOE_BOUNDED_WAITS)  # ptxas would take most of the time
  set(code -virtual)
elseif(NVFP4_MOE_EMULATE)
  set(code "")
endif()
# wgmma is in the architecture-specific instruction set only.
cuda_room(sm90 FOLDERS backend/sm90 USES cuda ARCHITECTURES 90a${code} BATCHES)
# A device assert is a function call, and ptxas serializes wgmma around calls.
target_compile_definitions(nvfp4_moe_sm90_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:NDEBUG>)
# tcgen05 and block-scaled mma are in the instruction sets of a family: 10.0 and 10.3, 12.0 and 12.1. Thor's is 11.0.
set(families_sm100 100f${code})
set(families_sm120 120f${code})
if(NVFP4_MOE_THOR)
  list(APPEND families_sm100 110f${code})
endif()
foreach(number 100 120)
  cuda_room(sm${number} FOLDERS backend/sm${number} USES cuda ARCHITECTURES "${families_sm${number}}" BATCHES)
endforeach()
foreach(code_of CODE_FOR_11 THOR)
  if(NVFP4_MOE_${code_of})
    target_compile_definitions(nvfp4_moe_cuda_objects PRIVATE $<$<COMPILE_LANGUAGE:CXX>:NVFP4_MOE_${code_of}>)
  endif()
endforeach()
if(NVFP4_MOE_RACECHECK)
  foreach(room sm90 sm100 sm120)
    target_compile_definitions(nvfp4_moe_${room}_objects PRIVATE NVFP4_MOE_RACECHECK)
  endforeach()
endif()
if(NVFP4_MOE_BOUNDED_WAITS)
  foreach(room sm90 sm100 sm120)
    target_compile_definitions(nvfp4_moe_${room}_objects PRIVATE NVFP4_MOE_BOUNDED_WAITS)
  endforeach()
endif()
