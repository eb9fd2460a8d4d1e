#include "cuda/planted_kernels.h"

namespace nvfp4_moe::internal::test {
namespace {

__global__ void flip_bit_kernel(uint8_t* byte) { *byte ^= 0x40; }

__global__ void wait_until_set_kernel(const volatile int* end) {
  while (*end == 0) __nanosleep(1000);
}

}  // namespace

cudaError_t flip_bit(uint8_t* byte, cudaStream_t stream) {
  flip_bit_kernel<<<1, 1, 0, stream>>>(byte);
  return cudaGetLastError();
}
cudaError_t wait_until_set(const int* end, cudaStream_t stream) {
  wait_until_set_kernel<<<1, 1, 0, stream>>>(end);
  return cudaGetLastError();
}

}  // namespace nvfp4_moe::internal::test
