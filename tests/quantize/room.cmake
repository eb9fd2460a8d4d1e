# What bench/measure_quantize.sh runs to count one rank's reads.
add_executable(load_rank ${CMAKE_CURRENT_SOURCE_DIR}/quantize/tools/load_rank.cpp)
target_link_libraries(load_rank PRIVATE nvfp4_moe_internal)
