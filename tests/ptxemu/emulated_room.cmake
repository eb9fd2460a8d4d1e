# The CUDA tests without a GPU: the objects of test_ROOM linked with the emulator in place of CUDA's run time, and its tests
# as those of the devices that tiers.txt names. A test has the label "emulated" where it is of the quick tier, which
# ./dev test runs, and "emulated_long" otherwise (./dev emulate).

# GoogleTest's pattern of the tests of a tier on a device: what tiers.txt says of this device and of all ("*").
function(emulated_tests out capability tier)
  file(STRINGS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/tiers.txt lines REGEX "^[^#]")
  set(patterns "")
  foreach(line ${lines})
    if(NOT line MATCHES "^([0-9.]+|\\*) +(quick|long|never) +([^ ]+)")
      message(FATAL_ERROR "tests/ptxemu/tiers.txt: expected CAPABILITY TIER PATTERN, found: ${line}")
    endif()
    if(CMAKE_MATCH_2 STREQUAL tier AND (CMAKE_MATCH_1 STREQUAL capability OR CMAKE_MATCH_1 STREQUAL "*"))
      list(APPEND patterns ${CMAKE_MATCH_3})
    endif()
  endforeach()
  list(JOIN patterns ":" joined)
  set(${out} "${joined}" PARENT_SCOPE)
endfunction()

function(add_emulated_room room)
  set(name emulated_${room})
  add_executable(${name} $<TARGET_OBJECTS:test_${room}>)
  # By their files, since the targets would bring CUDA's own run time.
  add_dependencies(${name} test_support nvfp4_moe_internal)
  target_link_libraries(${name} PRIVATE $<TARGET_FILE:test_support> $<TARGET_FILE:nvfp4_moe_internal> ptxemu
                                        GTest::gtest GTest::gmock GTest::gtest_main Threads::Threads)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  set_property(GLOBAL APPEND PROPERTY NVFP4_MOE_TEST_TARGETS ${name})
  foreach(capability 8.0 9.0 12.0)
    emulated_tests(quick ${capability} quick)
    emulated_tests(long ${capability} long)
    emulated_tests(never ${capability} never)
    if(quick)
      gtest_discover_tests(${name} TEST_PREFIX "emulated/${capability}/${room}/" DISCOVERY_MODE PRE_TEST TEST_FILTER "${quick}"
                           PROPERTIES LABELS emulated ENVIRONMENT PTXEMU_CC=${capability} TIMEOUT 900)
    endif()
    gtest_discover_tests(${name} TEST_PREFIX "emulated/${capability}/${room}/" DISCOVERY_MODE PRE_TEST TEST_FILTER "${long}-${quick}:${never}"
                         PROPERTIES LABELS emulated_long ENVIRONMENT PTXEMU_CC=${capability} TIMEOUT 3600)
  endforeach()
endfunction()
