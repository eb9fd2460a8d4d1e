# For aarch64 from another host, by Debian's cross compiler (g++-aarch64-linux-gnu), whose programs qemu-user runs here.
#
# All packages that this repository asks for are headers (docs/contribute/dependencies.md), and Debian's cross compiler looks into
# /usr/include last: the host's own packages serve, and only their CMake files have to be found.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
list(APPEND CMAKE_PREFIX_PATH /usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu/cmake)
# -L: where the loader and the libraries of aarch64 lie.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
