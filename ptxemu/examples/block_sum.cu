// A race that rarely changes results. Each block sums 256 numbers in shared memory; `block_sum
// racy` leaves a barrier out. On the emulator PTXEMU_CHECK=order reports both accesses, regardless
// of which one ran first.
#include <cstdio>
#include <cstring>

template <bool kRacy>
__global__ void block_sum(const int* in, int* out) {  // in (blocks, 256), out (blocks)
  __shared__ int partial[256];
  const int thread = static_cast<int>(threadIdx.x);
  partial[thread] = in[blockIdx.x * 256 + thread];
  for (int step = 128; step > 0; step /= 2) {
    if (!kRacy || step >= 32) __syncthreads();  // "a warp runs in step": it does not
    if (thread < step) partial[thread] += partial[thread + step];
  }
  if (thread == 0) out[blockIdx.x] = partial[0];
}

int main(int count, char** arguments) {
  constexpr int kBlocks = 4;
  int numbers[kBlocks * 256], sums[kBlocks], *in, *out;
  for (int i = 0; i < kBlocks * 256; ++i) numbers[i] = i;
  cudaMalloc(&in, sizeof numbers);
  cudaMalloc(&out, sizeof sums);
  cudaMemcpy(in, numbers, sizeof numbers, cudaMemcpyHostToDevice);
  if (count > 1 && !std::strcmp(arguments[1], "racy"))
    block_sum<true><<<kBlocks, 256>>>(in, out);
  else
    block_sum<false><<<kBlocks, 256>>>(in, out);
  const cudaError_t error = cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::printf("the launch failed: %s\n", cudaGetErrorString(error));
    return 1;
  }
  for (int block = 0; block < kBlocks; ++block) {
    const int expected = 256 * 256 * block + 255 * 128;
    std::printf("block %d: %d%s\n", block, sums[block], sums[block] == expected ? "" : " WRONG");
    if (sums[block] != expected) return 1;
  }
  return 0;
}
