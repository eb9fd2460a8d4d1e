# Writes a file with cuda_kernels_id(), a hash of the sources of the kernels and of their self-check, so that a check's
# result holds for these only.
# cmake -D OUT=file -D SRC=src -D COMPILER=version -P kernels_id.cmake
file(GLOB_RECURSE sources RELATIVE ${SRC} ${SRC}/backend/cuda/* ${SRC}/backend/sm*/* ${SRC}/core/*.h)
file(GLOB checks RELATIVE ${SRC} ${SRC}/backend/*.h ${SRC}/backend/*.cpp ${SRC}/moe/self_check* ${SRC}/moe/exact_layer*)
list(APPEND sources ${checks})
list(SORT sources)
set(text ${COMPILER})
foreach(source ${sources})
  file(SHA256 ${SRC}/${source} hash)
  string(APPEND text "\n${source} ${hash}")
endforeach()
string(SHA256 id "${text}")
string(SUBSTRING ${id} 0 16 id)
file(WRITE ${OUT} "#include \"backend/cuda_driver.h\"

namespace nvfp4_moe::internal {
const char* cuda_kernels_id() { return \"${id}\"; }
}  // namespace nvfp4_moe::internal
")
