// Dense linears on a GPU at sizes that tests/layer does not reach.
#include "moe/linear.h"

#include <cuda_runtime.h>

#include <cstring>
#include <vector>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/random.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "judge/judge.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

struct Weight {
  std::vector<uint8_t> codes, scales;
  int64_t rows, cols;
  Weight(int64_t rows_, int64_t cols_) : rows(rows_), cols(cols_) {
    Random random(static_cast<uint64_t>(rows * 1000 + cols));
    for (int64_t i = 0; i < rows * cols / 2; ++i)
      codes.push_back(static_cast<uint8_t>(random.below(256)));
    for (int64_t i = 0; i < rows * cols / 16; ++i)
      scales.push_back(static_cast<uint8_t>(0x34 + random.below(8)));
  }
  Nvfp4View view() const {
    return Nvfp4View::contiguous(codes.data(), scales.data(), 0.01f, rows, cols);
  }
};

using CudaLinear = BackendTest;

TEST_P(CudaLinear, AgreesWithTheCpuAndInAGraph) {
  const struct {
    int64_t rows, cols, tokens;
    DType out;
  } shapes[] = {{1024, 4096, 1, DType::kBf16}, {1040, 2064, 7, DType::kF32},
                {200, 1040, 130, DType::kF16}, {333, 528, 40, DType::kBf16},
                {512, 256, 2100, DType::kF16}, {768, 1536, 600, DType::kBf16}};
  for (ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const auto& shape : shapes) {
      SCOPED_TRACE(std::string(to_string(format)) + " " + std::to_string(shape.rows) + " x " +
                   std::to_string(shape.cols) + " " + std::to_string(shape.tokens));
      const Weight weight(shape.rows, shape.cols);
      LinearOptions options;
      options.activation_format = format;
      options.max_tokens = shape.tokens;
      options.backend = options.device = "cpu";
      const auto host = must(NvfpLinear::open(weight.view(), options));
      options.backend = backend().name;
      options.device = "cuda:0";
      const auto gpu = must(NvfpLinear::open(weight.view(), options));
      Random random(7);
      std::vector<uint16_t> x;
      for (int64_t i = 0; i < shape.tokens * shape.cols; ++i)
        x.push_back(bf16_from_double(random.normal()));
      const size_t out_bytes = static_cast<size_t>(shape.tokens * shape.rows * bits(shape.out) / 8);
      std::vector<uint8_t> expected(out_bytes);
      const auto space = must(allocate_pages((*host)->workspace_bytes()));
      LinearBatch batch{shape.tokens, x.data(), DType::kBf16, expected.data(), shape.out};
      ASSERT_OK((*host)->run(batch, space->data(), space->size_bytes()));

      const OnDevice<uint16_t> device_x(x);
      const OnDevice<uint8_t> device_out(out_bytes), workspace((*gpu)->workspace_bytes());
      ASSERT_CUDA(cudaMemset(workspace.data(), 0xFF, (*gpu)->workspace_bytes()));
      ASSERT_CUDA(cudaDeviceSynchronize());  // the stream below does not wait for any other
      batch.x = device_x.data();
      batch.out = device_out.data();
      const OwnStream stream;
      const auto run = [&] {
        return (*gpu)->run(batch, workspace.data(), (*gpu)->workspace_bytes(), stream);
      };
      ASSERT_OK(run());
      stream.synchronize();
      const std::vector<uint8_t> actual = device_out.back();
      const Graph graph(stream, run, cudaStreamCaptureModeGlobal);
      ASSERT_OK(graph.status());
      for (int i = 0; i < 3; ++i) {
        ASSERT_CUDA(cudaMemsetAsync(device_out.data(), 0xFF, out_bytes, stream));
        graph.launch();
      }
      stream.synchronize();
      EXPECT_EQ(actual, device_out.back());
      const std::vector<float> e = to_floats(expected, shape.out), a = to_floats(actual, shape.out);
      const Comparison comparison = compare(e.data(), a.data(), shape.tokens, shape.rows);
      EXPECT_EQ(comparison.nonfinite_mismatches, 0);
      // The same products, summed in fp32 in another order, then rounded once: less than an ulp of
      // the output's type apart. In fp32 it is less than K 2^-24; with alternating signs the error
      // grows with the root of K.
      EXPECT_LT(comparison.relative_l2, shape.out == DType::kF32   ? 1e-5
                                        : shape.out == DType::kF16 ? 0x1p-10
                                                                   : 0x1p-8);
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaLinear, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
