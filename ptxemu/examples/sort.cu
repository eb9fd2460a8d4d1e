// An ordinary CUDA program: CUB, which comes with CUDA, sorts pairs and sums them on the available
// device. Prints what it sorted and the device's name. Exit status 1 if the order or the sum is
// wrong.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cub/cub.cuh>
#include <random>
#include <vector>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      return 1;                                                                           \
    }                                                                                     \
  } while (0)

int main() {
  constexpr int kCount = 5000;
  std::vector<uint32_t> keys(kCount), sorted(kCount);
  std::mt19937 random(1);
  for (uint32_t& key : keys) key = random();

  uint32_t *in, *out;
  uint64_t* sum;
  CHECK(cudaMalloc(&in, kCount * sizeof *in));
  CHECK(cudaMalloc(&out, kCount * sizeof *out));
  CHECK(cudaMalloc(&sum, sizeof *sum));
  CHECK(cudaMemcpy(in, keys.data(), kCount * sizeof *in, cudaMemcpyHostToDevice));

  void* scratch = nullptr;
  size_t sort_bytes = 0, sum_bytes = 0;
  CHECK(cub::DeviceRadixSort::SortKeys(nullptr, sort_bytes, in, out, kCount));
  CHECK(cub::DeviceReduce::Reduce(nullptr, sum_bytes, in, sum, kCount, cuda::std::plus<>{},
                                  uint64_t{0}));
  CHECK(cudaMalloc(&scratch, std::max(sort_bytes, sum_bytes)));
  CHECK(cub::DeviceRadixSort::SortKeys(scratch, sort_bytes, in, out, kCount));
  CHECK(cub::DeviceReduce::Reduce(scratch, sum_bytes, out, sum, kCount, cuda::std::plus<>{},
                                  uint64_t{0}));

  uint64_t actual, expected = 0;
  CHECK(cudaMemcpy(sorted.data(), out, kCount * sizeof *out, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(&actual, sum, sizeof actual, cudaMemcpyDeviceToHost));
  std::sort(keys.begin(), keys.end());
  for (const uint32_t key : keys) expected += key;

  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const bool right = sorted == keys && actual == expected;
  std::printf("%d keys sorted and summed on %s (%d.%d): %s\n", kCount, device.name, device.major,
              device.minor, right ? "right" : "WRONG");
  return right ? 0 : 1;
}
