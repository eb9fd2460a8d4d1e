# The executable under test, and its parts for the tests that need no process.
target_sources(test_cli PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/cli/run_tool.cpp)
target_link_libraries(test_cli PRIVATE nvfp4_moe_cli)
target_compile_definitions(test_cli PRIVATE NVFP4_MOE_TOOL="$<TARGET_FILE:nvfp4-moe>")
add_dependencies(test_cli nvfp4-moe)
