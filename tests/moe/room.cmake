# The installed package: exported symbols, the header as C11, the example built against an installed tree.
set(c_header ${PROJECT_SOURCE_DIR}/include/nvfp4_moe/nvfp4_moe.h)
add_test(NAME moe/exports COMMAND sh ${CMAKE_CURRENT_SOURCE_DIR}/moe/exports_test.sh $<TARGET_FILE:nvfp4_moe> ${c_header}
                                  ${PROJECT_VERSION} ${CMAKE_CURRENT_SOURCE_DIR}/moe/abi_baseline.txt)

add_executable(test_moe_header_c11 ${CMAKE_CURRENT_SOURCE_DIR}/moe/header_c11.c)
set_target_properties(test_moe_header_c11 PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_compile_options(test_moe_header_c11 PRIVATE -Wall -Wextra -Wpedantic -Werror)
target_link_libraries(test_moe_header_c11 PRIVATE nvfp4_moe nvfp4_moe_flags)  # flags: a sanitizer, if any
if(NVFP4_MOE_SANITIZE)  # the library needs the sanitizer's C++ run time
  set_target_properties(test_moe_header_c11 PROPERTIES LINKER_LANGUAGE CXX)
endif()
add_test(NAME moe/header_c11 COMMAND test_moe_header_c11)

set_tests_properties(moe/exports moe/header_c11 PROPERTIES LABELS moe)
add_dependencies(test_moe nvfp4_moe test_moe_header_c11)  # one target builds what the room's tests need
if(NOT NVFP4_MOE_SANITIZE)  # programs outside the tree are not built with sanitizers
  add_test(NAME moe/abi COMMAND sh ${CMAKE_CURRENT_SOURCE_DIR}/moe/abi_test.sh ${c_header}
                                ${CMAKE_CURRENT_SOURCE_DIR}/moe/abi_baseline.txt ${CMAKE_C_COMPILER})
  add_test(NAME moe/embed COMMAND sh ${CMAKE_CURRENT_SOURCE_DIR}/moe/embed_test.sh ${PROJECT_SOURCE_DIR}
                                  ${PROJECT_BINARY_DIR} ${CMAKE_GENERATOR} ${CMAKE_C_COMPILER} ${CMAKE_CXX_COMPILER})
  set_tests_properties(moe/abi moe/embed PROPERTIES LABELS moe SKIP_RETURN_CODE 77 TIMEOUT 240)
endif()
