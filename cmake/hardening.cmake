# What a fault in a parser meets before it is an attack: stack protectors, checked copies, and no writable table of
# addresses to jump through. For every room that reads files, text or a caller's memory; core and the backends compute
# and parse nothing. tools/check/check_hardening.py reads what the linker made of it.
add_library(nvfp4_moe_hardening INTERFACE)
if(NOT NVFP4_MOE_SANITIZE)  # the sanitizers check more, and fortified functions hide reads from them
  target_compile_options(nvfp4_moe_hardening INTERFACE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fstack-protector-strong;-fstack-clash-protection;-Wformat;-Wformat-security>"
    # Debian's and Ubuntu's compilers may define it already. It needs optimization.
    "$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_compile_options(nvfp4_moe_hardening INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-fcf-protection>")
  endif()
endif()

# Of what is linked: all addresses are bound and made read-only before main, and no stack can be executed.
set(NVFP4_MOE_LINK_HARDENING -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack)

# CMake gives executables -fPIE by itself, and -pie only where it was asked whether the linker takes it.
include(CheckPIESupported)
check_pie_supported()
