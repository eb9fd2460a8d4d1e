# Runs the rooms with CPU kernels on emulated processors. qemu-user emulates an x86-64 without AVX (x86-64-v2), one with AVX2
# only, an aarch64 with dot products, and one without. The aarch64 tests come from the folder build/aarch64 (cmake --preset
# aarch64), which ./dev test --other-cpu builds if it can.
# They are in the second tier, because an emulated room takes minutes, except for aarch64's kernels, which no other test runs.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# A program that only some processors can run. It shows that an emulated processor fails on instructions that it lacks.
add_executable(test_foreign_instruction ${CMAKE_CURRENT_SOURCE_DIR}/other_cpu/foreign_instruction.cpp)
target_link_libraries(test_foreign_instruction PRIVATE nvfp4_moe_flags)

if(CMAKE_CROSSCOMPILING)  # the host's build runs its tests
  return()
endif()

# Tests that the emulator need not run: the exact reference is slow, and like core/ and formats/ plain C++ without special
# instructions. Properties compare the kernels of the other tests with themselves.
set(exclude "*/reference:*ReferenceAgainstContract*:*Properties.*:*Int8BlockReference.*:WrongLayer.*")

# add_other_cpu(NAME LABEL option...): runs run_room.py on a program, under its room's name in ctest.
function(add_other_cpu name label)
  add_test(NAME other_cpu/${name} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/other_cpu/run_room.py ${ARGN})
  set_tests_properties(other_cpu/${name} PROPERTIES LABELS ${label} COST 60 SKIP_RETURN_CODE 77 TIMEOUT 1800)
endfunction()

# --runs: the instruction sets of src/backend/cpu that the rooms must run on the model, best first. They must skip all others.
foreach(processor "Nehalem;portable" "Haswell;avx2,portable")
  list(GET processor 0 model)
  list(GET processor 1 runs)
  set(on --of x86_64 --cpu ${model} --runs ${runs})
  add_other_cpu(${model}/foreign_instructions long ${on} --foreign $<TARGET_FILE:test_foreign_instruction>)
  foreach(room cpu steps layer moe)
    add_other_cpu(${model}/${room} long ${on} "--filter=-${exclude}" $<TARGET_FILE:test_${room}>)
  endforeach()
endforeach()

set(aarch64 ${PROJECT_BINARY_DIR}/../aarch64/tests)
set(n1 --of aarch64 --cpu neoverse-n1 --runs neon,portable)  # the oldest server core with dot products
set(a57 --of aarch64 --cpu cortex-a57 --runs portable)
# qemu-user fails an assertion if a process forks while its threads are busy.
set(forks "Fork*")
add_other_cpu(neoverse-n1/foreign_instructions other_cpu ${n1} --foreign ${aarch64}/test_foreign_instruction)
add_other_cpu(cortex-a57/foreign_instructions other_cpu ${a57} --foreign ${aarch64}/test_foreign_instruction)
# The room cpu is split: the quick tier has each product and step. Layers are in the long tier, because making weights is slow.
add_other_cpu(neoverse-n1/cpu_integer_layers long ${n1} "--filter=*Layer.OfInteger*" ${aarch64}/test_cpu)
add_other_cpu(neoverse-n1/cpu_fp32_layers long ${n1} "--filter=*Layer.OfProductsInFp32*" ${aarch64}/test_cpu)
add_other_cpu(neoverse-n1/cpu other_cpu ${n1} "--filter=-*Layer.*" ${aarch64}/test_cpu)
add_other_cpu(neoverse-n1/core long ${n1} "--filter=-${forks}" ${aarch64}/test_core)
add_other_cpu(cortex-a57/cpu other_cpu ${a57} "--filter=-*Layer.*:*Multiply.*" ${aarch64}/test_cpu)
foreach(room cpu steps layer moe)
  add_other_cpu(cortex-a57/whole_${room} long ${a57} "--filter=-${exclude}:${forks}" ${aarch64}/test_${room})
endforeach()
# Every case of the table on NEON. The portable loops are the same on both, and run every case above.
foreach(room steps layer)
  add_other_cpu(neoverse-n1/whole_${room} long --of aarch64 --cpu neoverse-n1 --runs neon
                "--filter=-${exclude}:${forks}:*/cpu_portable" ${aarch64}/test_${room})
endforeach()
foreach(room moe checkpoint_files checkpoint formats gguf judge quantize)
  add_other_cpu(neoverse-n1/whole_${room} long ${n1} "--filter=-${exclude}:${forks}" ${aarch64}/test_${room})
endforeach()
