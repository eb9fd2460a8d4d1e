// Single instructions of 10.x: tcgen05.alloc, cp with ld, and one mma of each operand format.
#include "acceptance/ladder/instructions.cuh"
#include "backend/cuda/ptx/tcgen05.cuh"
#include "backend/sm100/row_tile.h"
#include "backend/sm100/weight_tile.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal::ladder {
namespace {

constexpr int kThreads = 128, kColumns = 32;  // one thread per lane of tensor memory
constexpr int kM = 128;

extern __shared__ __align__(1024) uint8_t shared_bytes[];

// Tensor memory of the cta and a barrier for what one thread issues.
struct Tensor {
  uint32_t address;
  uint64_t done;
};
__device__ inline void open(Tensor& tensor) {
  if (threadIdx.x < 32) ptx::tcgen05_alloc<kColumns>(ptx::shared_address(&tensor.address));
  ptx::tcgen05_fence_before_thread_sync();
  init_barrier(ptx::shared_address(&tensor.done), 1);
  ptx::tcgen05_fence_after_thread_sync();
}
__device__ inline void wait(Tensor& tensor) {
  ptx::mbarrier_wait(ptx::shared_address(&tensor.done), 0);
  ptx::tcgen05_fence_after_thread_sync();
}
__device__ inline void close(const Tensor& tensor) {
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (threadIdx.x < 32) ptx::tcgen05_dealloc<kColumns>(tensor.address);
}

// to: (128 lanes, columns) of tensor memory from a column on.
__device__ inline void store_lanes(uint32_t* to, uint32_t address, int columns) {
  const uint32_t lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  for (int column = 0; column < columns; column += 8)
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t first = threadIdx.x / 32 * 32 + half * 16;
      uint32_t loaded[4];
      ptx::tcgen05_load_16x256b(loaded, address + (first << 16) + static_cast<uint32_t>(column));
      ptx::tcgen05_wait_load();
      for (uint32_t i = 0; i < 4; ++i)
        to[(first + r + i / 2 * 8) * static_cast<uint32_t>(columns) +
           static_cast<uint32_t>(column) + 2 * q + i % 2] = loaded[i];
    }
}

// All 512 columns are free: the first one's address is 0.
__global__ void alloc_kernel(const uint32_t*, uint32_t* to) {
  __shared__ uint32_t address;
  ptx::tcgen05_alloc<512>(ptx::shared_address(&address));
  __syncwarp();
  if (threadIdx.x == 0) *to = address;
  ptx::tcgen05_dealloc<512>(address);
}
std::string alloc() {
  for (int launch = 0; launch < 2; ++launch)
    if (std::string wrong = compare(alloc_kernel, 32, 0, Words(1), Words(1, 0)); !wrong.empty())
      return wrong;
  return "";
}

// Two copies of 512 bytes, of 32 rows by four columns each, in all four groups of 32 lanes.
__global__ void cp_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ Tensor tensor;
  fill_shared(shared_bytes, from, 256);
  open(tensor);
  if (threadIdx.x == 0) {
    const uint32_t bytes = ptx::shared_address(shared_bytes);
    for (uint32_t copy = 0; copy < 2; ++copy)
      ptx::tcgen05_copy_scales(
          tensor.address + copy * 4,
          ptx::tcgen05_descriptor(bytes + copy * 512, 8 * 16, ptx::Swizzle::kNone));
    ptx::tcgen05_commit(ptx::shared_address(&tensor.done));
  }
  wait(tensor);
  store_lanes(to, tensor.address, 8);
  close(tensor);
}
std::string cp_and_ld() {
  const Words from = random_words(256);
  Words expected;
  for (size_t lane = 0; lane < kM; ++lane)
    for (size_t column = 0; column < 8; ++column)
      expected.push_back(from[column / 4 * 128 + lane % 32 * 4 + column % 4]);
  return compare(cp_kernel, kThreads, 1024, from, expected);
}

constexpr int kBf16N = 16, kBf16K = 16;
constexpr int kBf16RowBytes = 128;  // in the 128-byte swizzle

__global__ void bf16_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ Tensor tensor;
  fill_shared(shared_bytes, from, (kM + kBf16N) * kBf16RowBytes / 4);
  open(tensor);
  if (threadIdx.x == 0) {
    const uint32_t a = ptx::shared_address(shared_bytes), b = a + kM * kBf16RowBytes;
    constexpr uint32_t kCore = 8 * kBf16RowBytes;
    ptx::tcgen05_mma_bf16(tensor.address, ptx::tcgen05_descriptor(a, kCore, ptx::Swizzle::k128B),
                          ptx::tcgen05_descriptor(b, kCore, ptx::Swizzle::k128B),
                          ptx::tcgen05_bf16_kind(kBf16N), false);
    ptx::tcgen05_commit(ptx::shared_address(&tensor.done));
  }
  wait(tensor);
  store_lanes(to, tensor.address, kBf16N);
  close(tensor);
}
std::string mma_bf16() {
  Random random(5);
  Words from((kM + kBf16N) * kBf16RowBytes / 4, 0);
  std::vector<float> values;
  for (int row = 0; row < kM + kBf16N; ++row)
    for (int k = 0; k < kBf16K; ++k) {
      values.push_back(static_cast<float>(random.below(9) - 4));
      const int at = row * kBf16RowBytes + ((k / 8) ^ (row & 7)) * 16 + k % 8 * 2;
      from[static_cast<size_t>(at / 4)] |= uint32_t{bf16_from_float(values.back())} << (at % 4 * 8);
    }
  const auto middle = values.begin() + kM * kBf16K;
  return compare(bf16_kernel, kThreads, (kM + kBf16N) * kBf16RowBytes, from,
                 product({values.begin(), middle}, {middle, values.end()}, kM, kBf16N, kBf16K),
                 element_of(kBf16N));
}

// The operands as sm100's kernels have them: a packed tile of weights, of which only the first 64 k
// are multiplied, and rows of 128 bytes.
constexpr int kFp4N = 8, kFp4K = 64;
constexpr int kRowsAt = static_cast<int>(cuda::kTileBytes);  // a multiple of 1024
constexpr int kRowScalesAt = kRowsAt + kFp4N * sm100::kRowBytes;
constexpr int kFp4Bytes = kRowScalesAt + sm100::kAtomBytes;
static_assert(kRowsAt % 1024 == 0);

__global__ void fp4_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ Tensor tensor;
  fill_shared(shared_bytes, from, kFp4Bytes / 4);
  open(tensor);
  if (threadIdx.x == 0) {
    const uint32_t bytes = ptx::shared_address(shared_bytes);
    const uint32_t scales_a = tensor.address + 16, scales_b = tensor.address + 20;
    ptx::tcgen05_copy_scales(scales_a,
                             ptx::tcgen05_descriptor(bytes + sm100::weight_scales_offset(0, 0), 128,
                                                     ptx::Swizzle::kNone));
    ptx::tcgen05_copy_scales(
        scales_b, ptx::tcgen05_descriptor(bytes + kRowScalesAt, 128, ptx::Swizzle::kNone));
    ptx::tcgen05_mma_fp4(
        tensor.address,
        ptx::tcgen05_descriptor(bytes, 8 * sm100::kWeightRowBytes, ptx::Swizzle::k64B),
        ptx::tcgen05_descriptor(bytes + kRowsAt, 8 * sm100::kRowBytes, ptx::Swizzle::k128B),
        ptx::tcgen05_fp4_kind(kFp4N), scales_a, scales_b, false);
    ptx::tcgen05_commit(ptx::shared_address(&tensor.done));
  }
  wait(tensor);
  store_lanes(to, tensor.address, kFp4N);
  close(tensor);
}
std::string mma_fp4() {
  Random random(6);
  std::vector<uint8_t> image(kFp4Bytes, 0);
  std::vector<float> values;
  for (int row = 0; row < kM + kFp4N; ++row) {
    const bool weights = row < kM;
    const int r = weights ? row : row - kM;
    for (int k = 0; k < kFp4K; ++k) {
      const int scale_at =
          weights ? sm100::weight_scales_offset(r, 0) : kRowScalesAt + sm100::atom_offset(r);
      uint8_t& scale = image[static_cast<size_t>(scale_at + k / 16)];
      if (k % 16 == 0) scale = static_cast<uint8_t>(0x30 + 8 * random.below(3));  // 1/2, 1, 2
      const auto code = static_cast<uint8_t>(random.below(16));
      const int codes_at = weights ? sm100::weight_codes_offset(r, k / 32)
                                   : kRowsAt + sm100::row_codes_offset(r, k / 32);
      image[static_cast<size_t>(codes_at + k % 32 / 2)] |=
          static_cast<uint8_t>(code << (k % 2 * 4));
      values.push_back(e2m1_to_float(code) * e4m3_to_float(scale));
    }
  }
  Words from(image.size() / 4);
  std::memcpy(from.data(), image.data(), image.size());
  const auto middle = values.begin() + kM * kFp4K;
  return compare(fp4_kernel, kThreads, kFp4Bytes, from,
                 product({values.begin(), middle}, {middle, values.end()}, kM, kFp4N, kFp4K),
                 element_of(kFp4N));
}

}  // namespace

std::vector<Instruction> sm100_instructions() {
  return with_common({{"tcgen05-alloc", alloc},
                      {"tcgen05-cp-ld", cp_and_ld},
                      {"tcgen05-mma-bf16", mma_bf16},
                      {"tcgen05-mma-fp4", mma_fp4}});
}

}  // namespace nvfp4_moe::internal::ladder
