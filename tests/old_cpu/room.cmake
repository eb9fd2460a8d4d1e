# The rooms that run CPU kernels, once more on processors that are older than the machine at hand: qemu-user emulates one
# without AVX (x86-64-v2) and one with AVX2 and no more. Second tier: an emulated room takes minutes.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# What only some processors can run; shows that an emulated one dies of the others' instructions.
add_executable(test_foreign_instruction ${CMAKE_CURRENT_SOURCE_DIR}/old_cpu/foreign_instruction.cpp)
target_link_libraries(test_foreign_instruction PRIVATE nvfp4_moe_flags)

# What an emulator need not run: the exact reference, slow enough by itself, is plain C++ without an
# instruction set, as is all of core/ and formats/; and Properties compare the kernels of the other tests with themselves.
set(exclude "*/reference:*ReferenceAgainstContract*:*Properties.*:*Int8BlockReference.*:WrongLayer.*")

# The instruction sets of src/backend/cpu that the rooms must run on the model, the best first; they must skip all others.
function(add_old_cpu model runs)
  set(run ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/old_cpu/run_room.py --cpu ${model} --runs ${runs})
  add_test(NAME old_cpu/${model}/foreign_instructions COMMAND ${run} --foreign $<TARGET_FILE:test_foreign_instruction>)
  set(names old_cpu/${model}/foreign_instructions)
  foreach(room cpu steps layer moe)
    add_test(NAME old_cpu/${model}/${room} COMMAND ${run} --exclude ${exclude} $<TARGET_FILE:test_${room}>)
    list(APPEND names old_cpu/${model}/${room})
  endforeach()
  set_tests_properties(${names} PROPERTIES LABELS long SKIP_RETURN_CODE 77 TIMEOUT 1800)
endfunction()

add_old_cpu(Nehalem portable)
add_old_cpu(Haswell avx2,portable)
