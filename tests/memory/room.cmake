# Memory allocation that fails on request: in the tests, and as a shared object that the command line preloads.
set(targets test_memory)
if(NVFP4_MOE_LONG_TESTS)
  list(APPEND targets test_memory_long)
endif()
foreach(target ${targets})
  set(room ${CMAKE_CURRENT_SOURCE_DIR}/memory)
  target_sources(${target} PRIVATE ${room}/failing_memory.cpp ${room}/sweep.cpp ${room}/operations.cpp)
  target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
  set_target_properties(${target} PROPERTIES ENABLE_EXPORTS ON)  # so that libstdc++ calls our pthread_create
endforeach()
set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/memory/failing_memory.cpp PROPERTIES
                            SKIP_UNITY_BUILD_INCLUSION ON)
add_library(failing_memory SHARED ${CMAKE_CURRENT_SOURCE_DIR}/memory/failing_memory.cpp)
target_include_directories(failing_memory PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_definitions(failing_memory PRIVATE NVFP4_MOE_PRELOADED)
target_link_libraries(failing_memory PRIVATE nvfp4_moe_flags ${CMAKE_DL_LIBS})

if(NVFP4_MOE_CLI)
  foreach(target ${targets})
    target_sources(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/cli/run_tool.cpp)
    target_compile_definitions(${target} PRIVATE NVFP4_MOE_TOOL="$<TARGET_FILE:nvfp4-moe>"
                                                 NVFP4_MOE_FAILING_MEMORY_OBJECT="$<TARGET_FILE:failing_memory>")
    add_dependencies(${target} nvfp4-moe failing_memory)
  endforeach()
endif()
