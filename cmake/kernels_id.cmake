# Writes a file with cuda_kernels_id(), a hash of the kernels' sources, so that a self-check's result holds for these only.
# cmake -D OUT=file -D SRC=src -D COMPILER=version -P kernels_id.cmake
file(GLOB_RECURSE sources RELATIVE ${SRC} ${SRC}/backend/cuda/* ${SRC}/backend/sm*/* ${SRC}/core/*.h)
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
