# The models that a soak compares with.
target_sources(test_soak PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/soak/models.cpp)
