#include "moe/linear.h"

#include <nlohmann/json.hpp>

#include "judge/judge.h"
#include "moe/tiny.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

struct Input {
  std::vector<uint16_t> x;  // (tokens, cols) bf16
  std::vector<float> out;   // (tokens, rows)
  LinearBatch batch;
  Input(int64_t tokens, int64_t rows, int64_t cols) : out(static_cast<size_t>(tokens * rows), -77.0f) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tokens * cols; ++i) x.push_back(bf16_from_float(normal(random)));
    batch = {tokens, x.data(), DType::kBf16, out.data(), DType::kF32};
  }
};

LinearOptions linear_options() { return {.max_tokens = 8, .executor = &serial_executor()}; }

TEST(Linear, ComputesTheProduct) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  for (const Backend* backend : test::runnable_backends()) {
    LinearOptions options = linear_options();
    options.backend = backend->name;
    options.activation_format = ActivationFormat::kBf16;
    auto linear = NvfpLinear::open(weight.view(), options);
    ASSERT_OK(linear);
    const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
    Input input(5, 40, 96);
    ASSERT_OK((*linear)->run(input.batch, workspace.data(), workspace.size_bytes()));
    for (int64_t t = 0; t < 5; ++t)
      for (int64_t r = 0; r < 40; ++r) {
        double sum = 0, sum_abs = 0;
        for (int64_t k = 0; k < 96; ++k) {
          const uint8_t byte = weight.view().row_codes(r)[k / 2];
          const double w = static_cast<double>(e2m1_to_float(k % 2 == 0 ? low_code(byte) : high_code(byte))) *
                           e4m3_to_float(weight.view().row_scales(r)[k / 16]) * weight.tensor_scale;
          const double p = w * bf16_to_float(input.x[static_cast<size_t>(t * 96 + k)]);
          sum += p;
          sum_abs += std::abs(p);
        }
        const float actual = input.out[static_cast<size_t>(t * 40 + r)];
        ASSERT_LE(std::abs(actual - sum), gemm_bound(96, 1, sum_abs, 0x1p-24 * std::abs(sum)))
            << backend->name << " " << t << " " << r;
      }
  }
}

TEST(Linear, BackendsAgreeInEveryMode) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  for (const ActivationScale scale :
       {ActivationScale::kDynamicToken, ActivationScale::kStatic, ActivationScale::kCompat}) {
    std::vector<float> first;
    for (const Backend* backend : test::runnable_backends()) {
      LinearOptions options = linear_options();
      options.backend = backend->name;
      options.activation_scale = scale;
      options.input_scale = 0.0013f;
      auto linear = NvfpLinear::open(weight.view(), options);
      ASSERT_OK(linear);
      const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
      Input input(5, 40, 96);
      ASSERT_OK((*linear)->run(input.batch, workspace.data(), workspace.size_bytes()));
      if (first.empty()) first = input.out;
      const Comparison comparison = compare(first.data(), input.out.data(), 5, 40);
      EXPECT_LT(comparison.relative_l2, 1e-6) << backend->name;  // the same products, fp32 sums in another order
      EXPECT_EQ(comparison.nonfinite_mismatches, 0);
    }
  }
}

TEST(Linear, BackendsAgreeOnInt8Blocks) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  std::vector<float> first;
  for (const Backend* backend : test::runnable_backends()) {
    LinearOptions options = linear_options();
    options.backend = backend->name;
    options.activation_format = ActivationFormat::kInt8Block;
    auto linear = NvfpLinear::open(weight.view(), options);
    ASSERT_OK(linear);
    EXPECT_EQ(nlohmann::json::parse((*linear)->describe_json())["activation_scale"], "dynamic_block");
    const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
    Input input(5, 40, 96);
    ASSERT_OK((*linear)->run(input.batch, workspace.data(), workspace.size_bytes()));
    if (first.empty()) first = input.out;
    const Comparison comparison = compare(first.data(), input.out.data(), 5, 40);
    EXPECT_LT(comparison.relative_l2, 1e-6) << backend->name;
    EXPECT_EQ(comparison.nonfinite_mismatches, 0);
    options.activation_scale = ActivationScale::kStatic;
    options.input_scale = 0.3f;
    EXPECT_THAT(NvfpLinear::open(weight.view(), options).status().message(),
                testing::HasSubstr("activation_scale: expected dynamic_token with activation_format int8_block"));
  }
}

TEST(Linear, BackendsAgreeOnFp8) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  std::vector<float> first;
  for (const Backend* backend : test::runnable_backends()) {
    LinearOptions options = linear_options();
    options.backend = backend->name;
    options.activation_format = ActivationFormat::kFp8;
    auto linear = NvfpLinear::open(weight.view(), options);
    ASSERT_OK(linear);
    const auto json = nlohmann::json::parse((*linear)->describe_json());
    EXPECT_EQ(json["activation_scale"], "dynamic_token");
    EXPECT_EQ(json["fp8_weights"]["weights"], 40 * 96);
    EXPECT_GT(json["fp8_weights"]["inexact"], 0);
    EXPECT_LT(json["fp8_weights"]["inexact"], 40 * 96 / 2);
    const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
    Input input(5, 40, 96);
    ASSERT_OK((*linear)->run(input.batch, workspace.data(), workspace.size_bytes()));
    if (first.empty()) first = input.out;
    const Comparison comparison = compare(first.data(), input.out.data(), 5, 40);
    EXPECT_LT(comparison.relative_l2, 1e-6) << backend->name;  // the same products, fp32 sums in another order
    EXPECT_EQ(comparison.nonfinite_mismatches, 0);
    options.activation_scale = ActivationScale::kStatic;
    options.input_scale = 0.3f;  // 1.8 where a row holds 448
    EXPECT_EQ(NvfpLinear::open(weight.view(), options).value()->weights().input_scale, 2.0f);
    options.activation_scale = ActivationScale::kCompat;
    EXPECT_THAT(NvfpLinear::open(weight.view(), options).status().message(),
                testing::HasSubstr("activation_scale: expected dynamic_token or static with activation_format fp8"));
  }
}

TEST(Linear, ResolvesItsScale) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(16, 32, 0.25f, random);
  LinearOptions options = linear_options();
  options.activation_scale = ActivationScale::kStatic;
  options.input_scale = 0.3f;
  options.static_headroom = 4.0f;
  EXPECT_EQ(NvfpLinear::open(weight.view(), options).value()->weights().input_scale, 2.0f);
  options.activation_scale = ActivationScale::kCompat;
  EXPECT_THAT(NvfpLinear::open(weight.view(), options).status().message(),
              testing::HasSubstr("static_headroom: expected none (1) with activation_scale compat, got 4"));
  options.static_headroom = 1.0f;
  EXPECT_EQ(NvfpLinear::open(weight.view(), options).value()->weights().input_scale, 0.3f);
  const auto json = nlohmann::json::parse(NvfpLinear::open(weight.view(), options).value()->describe_json());
  EXPECT_EQ(json["rows"], 16);
}

TEST(Linear, Refuses) {
  std::mt19937 random(1);
  Matrix weight = Matrix::random(16, 32, 0.25f, random);
  LinearOptions options = linear_options();
  options.activation_scale = ActivationScale::kStatic;  // without an input scale
  EXPECT_EQ(NvfpLinear::open(weight.view(), options).status().code(), Code::kInvalidArgument);
  options = linear_options();
  options.max_tokens = 0;
  EXPECT_EQ(NvfpLinear::open(weight.view(), options).status().code(), Code::kInvalidArgument);
  options = linear_options();
  options.backend = "fast";
  EXPECT_EQ(NvfpLinear::open(weight.view(), options).status().code(), Code::kInvalidArgument);
  Nvfp4View view = weight.view();
  view.cols = 24;
  EXPECT_EQ(NvfpLinear::open(view, linear_options()).status().code(), Code::kInvalidArgument);
  weight.block_scales[0] = 0x80;
  EXPECT_EQ(NvfpLinear::open(weight.view(), linear_options()).status().code(), Code::kBadInput);
  weight.block_scales[0] = 0x38;

  auto linear = NvfpLinear::open(weight.view(), linear_options());
  ASSERT_OK(linear);
  const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
  const auto run = [&](const LinearBatch& batch) {
    return (*linear)->run(batch, workspace.data(), workspace.size_bytes()).code();
  };
  Input input(8, 16, 32);
  EXPECT_EQ(run(input.batch), Code::kOk);
  LinearBatch batch = input.batch;
  batch.tokens = 9;
  EXPECT_EQ(run(batch), Code::kInvalidArgument);
  batch = input.batch;
  batch.x = nullptr;
  EXPECT_EQ(run(batch), Code::kInvalidArgument);
  batch = input.batch;
  batch.out = workspace.data();
  EXPECT_EQ(run(batch), Code::kInvalidArgument);
  batch = input.batch;
  batch.x_dtype = DType::kU8;
  EXPECT_EQ(run(batch), Code::kInvalidArgument);
  EXPECT_EQ((*linear)->run(input.batch, workspace.data(), (*linear)->workspace_bytes() - 1).code(),
            Code::kInvalidArgument);
  const Input two(2, 16, 32);
  EXPECT_LT((*linear)->workspace_bytes(2), (*linear)->workspace_bytes());
  EXPECT_OK((*linear)->run(two.batch, workspace.data(), (*linear)->workspace_bytes(2)));
  EXPECT_EQ((*linear)->run(two.batch, workspace.data(), (*linear)->workspace_bytes(2) - 1).code(),
            Code::kInvalidArgument);
  EXPECT_EQ((*linear)->run(input.batch, nullptr, workspace.size_bytes()).code(), Code::kInvalidArgument);
  EXPECT_EQ(run(LinearBatch{}), Code::kOk);  // no tokens
}

}  // namespace
}  // namespace nvfp4_moe::internal
