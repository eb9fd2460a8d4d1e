# Toolchain for aarch64 on another host: Debian's cross compiler (g++-aarch64-linux-gnu), with qemu-user to run programs.
#
# All packages that this repository needs are headers (docs/contribute/dependencies.md), and Debian's cross compiler searches
# /usr/include last. So the host's packages are enough, and only their CMake files have to be found.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
list(APPEND CMAKE_PREFIX_PATH /usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu/cmake)
# -L: the folder of the aarch64 loader and libraries.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
