# The recorder defines open, write, fsync and similar functions for this executable.
target_sources(test_durability PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/durability/recorded_calls.cpp
                                       ${CMAKE_CURRENT_SOURCE_DIR}/durability/crash_images.cpp)
target_link_libraries(test_durability PRIVATE ${CMAKE_DL_LIBS})
set_target_properties(test_durability PROPERTIES UNITY_BUILD OFF)
