# Runs the project's CUDA programs without a GPU: a program's objects are linked a second time, with the emulator instead of
# CUDA's run time. Tests run on the emulated devices of tiers.txt. Tests of the quick tier, which ./dev test runs, have the label
# "emulated", the others "emulated_long" (./dev emulate). emulated/CAPABILITY/fewer are tests of the second tier that the quick
# tier runs over fewer cases. emulated/CAPABILITY/checked are tests that also run under the checker of order, in one process.
# COST makes the longest tests start first, so that no core waits for one at the end.

# emulated_program(TARGET library...): makes emulated_TARGET. The libraries are further static libraries of this project.
function(emulated_program target)
  add_executable(emulated_${target} $<TARGET_OBJECTS:${target}>)
  foreach(library ${ARGN} nvfp4_moe_internal)
    # By its file, because the target would link CUDA's run time.
    target_link_libraries(emulated_${target} PRIVATE $<TARGET_FILE:${library}>)
    add_dependencies(emulated_${target} ${library})
  endforeach()
  if(test_support IN_LIST ARGN)
    target_link_libraries(emulated_${target} PRIVATE GTest::gtest GTest::gmock GTest::gtest_main)
  endif()
  target_link_libraries(emulated_${target} PRIVATE ptxemu Threads::Threads)
  target_link_options(emulated_${target} PRIVATE $<TARGET_PROPERTY:${target},LINK_OPTIONS>)
  set_target_properties(emulated_${target} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

# Makes a GoogleTest pattern of a tier's tests on a device, from the lines of tiers.txt for this device and for all ("*").
function(emulated_tests out capability tier)
  file(STRINGS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tiers.txt lines REGEX "^[^#]")
  set(patterns "")
  foreach(line ${lines})
    if(NOT line MATCHES "^([0-9.]+|\\*) +(quick|fewer|long|never|checked) +([^ ]+)")
      message(FATAL_ERROR "tests/emulated/tiers.txt: expected CAPABILITY TIER PATTERN, found: ${line}")
    endif()
    if(CMAKE_MATCH_2 STREQUAL tier AND (CMAKE_MATCH_1 STREQUAL capability OR CMAKE_MATCH_1 STREQUAL "*"))
      list(APPEND patterns ${CMAKE_MATCH_3})
    endif()
  endforeach()
  list(JOIN patterns ":" joined)
  set(${out} "${joined}" PARENT_SCOPE)
endfunction()

# Layers that open take their backend unchecked, because the emulator is too slow for the time limit of a self-check.
function(add_emulated_room room)
  set(name emulated_test_${room})
  emulated_program(test_${room} test_support)
  set_property(GLOBAL APPEND PROPERTY NVFP4_MOE_TEST_TARGETS ${name})
  foreach(capability 8.0 9.0 10.0 12.0)
    emulated_tests(quick ${capability} quick)
    emulated_tests(long ${capability} long)
    emulated_tests(never ${capability} never)
    if(quick)
      gtest_discover_tests(${name} TEST_PREFIX "emulated/${capability}/${room}/" DISCOVERY_MODE PRE_TEST TEST_FILTER "${quick}"
                           PROPERTIES LABELS emulated COST 60 ENVIRONMENT PTXEMU_CC=${capability}
                                      ENVIRONMENT_MODIFICATION NVFP4_MOE_SELF_CHECK=set:off TIMEOUT 900)
    endif()
    gtest_discover_tests(${name} TEST_PREFIX "emulated/${capability}/${room}/" DISCOVERY_MODE PRE_TEST TEST_FILTER "${long}-${quick}:${never}"
                         PROPERTIES LABELS emulated_long ENVIRONMENT PTXEMU_CC=${capability}
                                    ENVIRONMENT_MODIFICATION NVFP4_MOE_SELF_CHECK=set:off TIMEOUT 3600)
    emulated_tests(fewer ${capability} fewer)
    if(fewer)
      gtest_discover_tests(${name} TEST_PREFIX "emulated/${capability}/fewer/${room}/" DISCOVERY_MODE PRE_TEST TEST_FILTER "${fewer}"
                           PROPERTIES LABELS emulated COST 60 ENVIRONMENT PTXEMU_CC=${capability}
                                      ENVIRONMENT_MODIFICATION NVFP4_MOE_FEWER_CASES=set:1 TIMEOUT 900)
    endif()
    emulated_tests(checked ${capability} checked)
    if(checked AND room STREQUAL cuda)
      add_test(NAME emulated/${capability}/checked
               COMMAND ${CMAKE_COMMAND} -E env PTXEMU_CC=${capability} PTXEMU_CHECK=order
                       PTXEMU_CHECK_KNOWN=${PROJECT_SOURCE_DIR}/tests/emulated/known_orders.txt
                       $<TARGET_FILE:${name}> --gtest_filter=${checked})
      set_tests_properties(emulated/${capability}/checked PROPERTIES LABELS emulated COST 60 TIMEOUT 900)
    endif()
  endforeach()
endfunction()
