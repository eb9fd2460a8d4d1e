#include "check.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <utility>

namespace cutlass_oracle {
namespace {

void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory that is freed with the value.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) { require(cudaMalloc(&data_, bytes)); }
  template <class T>
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size() * sizeof(T)) {
    require(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  void* get() const { return data_; }
  std::vector<uint8_t> read() const {
    std::vector<uint8_t> host(bytes_);
    require(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// A product, its operands on the device, and the memory that its kernel writes.
struct Prepared {
  Problem problem;
  std::deque<Buffer> buffers;
  const Buffer *d = nullptr, *d_scales = nullptr;
  Gemm gemm{};
};

void prepare(Prepared& x, const Kernel& kernel, const Size& size) {
  const auto on_device = [&](const auto& from) { return x.buffers.emplace_back(from).get(); };
  Gemm& gemm = x.gemm;
  gemm.m = size.m, gemm.n = size.n, gemm.k = size.k;
  gemm.a = on_device(x.problem.a.bytes);
  gemm.b = on_device(x.problem.b.bytes);
  if (kernel.nvfp4) {
    gemm.a_scales = on_device(x.problem.a.scales);
    gemm.b_scales = on_device(x.problem.b.scales);
  }
  if (!x.problem.c.empty()) gemm.c = on_device(x.problem.c);
  gemm.alpha = static_cast<const float*>(on_device(std::vector<float>{x.problem.alpha}));
  gemm.norm = static_cast<const float*>(on_device(std::vector<float>{x.problem.norm}));
  gemm.beta = x.problem.beta;
  gemm.d = on_device(static_cast<size_t>(size.m) * size.n * output_bits(kernel.output) / 8);
  x.d = &x.buffers.back();
  if (kernel.output == Output::kNvfp4) {
    gemm.d_scales = on_device(static_cast<size_t>(scale_bytes(size.m, size.n / 16)));
    x.d_scales = &x.buffers.back();
  }
}

}  // namespace

const std::vector<const Kernel*>& kernels() {
  static const std::vector<const Kernel*> all = {
      &kSm100Dense,           &kSm100Narrow,    &kSm100Wide, &kSm100Pair,  &kSm100Grouped,
      &kSm100GroupedPair,     &kSm100Fp4Output, &kSm100Bf16, &kSm120Dense, &kSm120Grouped,
      &kSm120GroupedPingpong, &kSm120Fp4Output};
  return all;
}

// Rows of D and of codes are multiples of 16 bytes, so n is a multiple of 8 (of 32 if the output is
// codes) and k of 32. Some k (32, 96, 352, 544 and 1056) have a number of scale columns that is not
// a multiple of four: it is two more than one.
std::vector<std::vector<Size>> launches(const Kernel& kernel) {
  if (kernel.grouped)
    return {{{128, 128, 256}},
            {{5, 64, 96}, {0, 64, 96}, {130, 64, 96}, {1, 64, 96}},
            {{257, 136, 288}, {3, 136, 288}, {0, 136, 288}, {0, 136, 288}, {64, 136, 288}},
            {{0, 256, 512}, {140, 256, 512}, {90, 256, 512}},
            {{70, 72, 32}, {200, 320, 544}}};
  const int n = kernel.output == Output::kNvfp4 ? 32 : 8;
  return {{{128, 128, 256}},    {{1, n, 32}},      {{77, 4 * n, 96}},
          {{200, 11 * n, 352}}, {{384, 288, 544}}, {{129, 160, 1056}}};
}

void set_order(const Order& order) {
  setenv("PTXEMU_ORDER", order.name, 1);
  setenv("PTXEMU_SEED", order.seed, 1);
  setenv("PTXEMU_TENSOR_LOADS", "registers", 1);
}

bool fits_device(const Kernel& kernel) {
  int major = 0;
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == kernel.capability / 10;
}

std::string check(const Kernel& kernel, const std::vector<Size>& sizes, Data data,
                  std::mt19937& random) {
  std::deque<Prepared> prepared;
  std::vector<Gemm> gemms;
  for (const Size& size : sizes) {
    const bool with_c = !kernel.grouped && kernel.output != Output::kNvfp4 && random() % 2;
    Prepared& x = prepared.emplace_back();
    x.problem = make_problem(size, kernel.nvfp4, data, with_c, random);
    prepare(x, kernel, size);
    gemms.push_back(x.gemm);
  }
  const std::string declined = kernel.run(gemms);
  if (!declined.empty()) return declined;
  require(cudaDeviceSynchronize());
  for (const Prepared& x : prepared) {
    const std::vector<uint8_t> d = x.d->read(),
                               scales = x.d_scales ? x.d_scales->read() : std::vector<uint8_t>{};
    const std::string wrong =
        judge(x.problem, exact_sums(x.problem), kernel.output, data, d, scales);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace cutlass_oracle
