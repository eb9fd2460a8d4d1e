# Compiler and linker hardening that keeps a bug in a parser from becoming an exploit: stack protectors, checked copies, and no
# writable table of addresses. For every room that reads files, text or a caller's memory. core and the backends parse nothing.
# tools/check/check_hardening.py checks the linked files.
add_library(nvfp4_moe_hardening INTERFACE)
if(NOT NVFP4_MOE_SANITIZE)  # sanitizers check more, and fortified functions would hide reads from them
  target_compile_options(nvfp4_moe_hardening INTERFACE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fstack-protector-strong;-fstack-clash-protection;-Wformat;-Wformat-security>"
    # Undefined first, because Debian's and Ubuntu's compilers may define it. It requires optimization.
    "$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(nvfp4_moe_hardening INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-fcf-protection>")
  endif()
endif()

# Linker options: all addresses are bound and made read-only before main, and no stack is executable.
set(NVFP4_MOE_LINK_HARDENING -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack)

# CMake adds -fPIE to executables by itself, but -pie only after a check that the linker supports it.
include(CheckPIESupported)
check_pie_supported()
