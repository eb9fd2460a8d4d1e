# The program with which tests/python/test_safetensors_files.py lets this library write files.
add_executable(safetensors_copy ${CMAKE_CURRENT_SOURCE_DIR}/checkpoint_files/tools/safetensors_copy.cpp)
target_link_libraries(safetensors_copy PRIVATE nvfp4_moe_internal)
