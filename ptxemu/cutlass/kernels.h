// CUTLASS's kernels as the driver sees them: a name, the GPU that they are for, and a function over
// device arrays.
//
// CUTLASS's headers are not included here: each kernel is compiled separately, because one takes up
// to a minute and 5 GiB, and the driver is plain C++.
#ifndef PTXEMU_CUTLASS_KERNELS_H_
#define PTXEMU_CUTLASS_KERNELS_H_

#include <string>
#include <vector>

namespace cutlass_oracle {

// D = alpha A B^T + beta C. Pointers are device pointers. Scales are in CUTLASS's tiles of 128x4.
struct Gemm {
  int m, n, k;
  const void* a;         // (m, k) E2M1 codes, two a byte, or bf16; row-major
  const void* b;         // (n, k) as a
  const void* a_scales;  // (m, k / 16) UE4M3; null of bf16
  const void* b_scales;  // (n, k / 16) UE4M3; null of bf16
  const void* c;         // (m, n) bf16, row-major; null if beta is 0
  void* d;               // (m, n) row-major, of the type that the kernel writes
  void* d_scales;        // (m, n / 16) UE4M3 of an E2M1 output; null of others
  const float* alpha;    // one value
  const float* norm;     // one value, the scale of an E2M1 output's scales; null of others
  float beta;            // 0 of grouped kernels
};

enum class Output { kF32, kBf16, kNvfp4 };

struct Kernel {
  const char* name;
  int capability;  // 100 or 120
  bool nvfp4;      // operands; bf16 otherwise
  bool grouped;    // takes several products, of the same k
  Output output;
  // Enqueues the products. "" or what CUTLASS declined.
  std::string (*run)(const std::vector<Gemm>& gemms);
};

// kernels.cu
extern const Kernel kSm100Dense, kSm100Narrow, kSm100Wide, kSm100Pair, kSm100Grouped,
    kSm100GroupedPair, kSm100Fp4Output, kSm100Bf16;
extern const Kernel kSm120Dense, kSm120Grouped, kSm120GroupedPingpong, kSm120Fp4Output;

}  // namespace cutlass_oracle

#endif  // PTXEMU_CUTLASS_KERNELS_H_
