# What a soak compares with, beside the soak.
target_sources(test_soak PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/soak/models.cpp)
