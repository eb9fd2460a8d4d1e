#include "moe/linear.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "judge/judge.h"
#include "moe/tiny.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

struct Input {
  std::vector<uint16_t> x;  // (tokens, cols) bf16
  std::vector<float> out;   // (tokens, rows)
  LinearBatch batch;
  Input(int64_t tokens, int64_t rows, int64_t cols)
      : out(static_cast<size_t>(tokens * rows), -77.0f) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tokens * cols; ++i) x.push_back(bf16_from_float(normal(random)));
    batch = {tokens, x.data(), DType::kBf16, out.data(), DType::kF32};
  }
};

LinearOptions linear_options() { return {.max_tokens = 8, .executor = &serial_executor()}; }

// tests/layer tests the products of each backend; here all must give those of the first.
TEST(Linear, BackendsAgreeInEveryMode) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  using Format = ActivationFormat;
  using Scale = ActivationScale;
  const struct {
    Format format;
    Scale scale;
    const char* described;  // null: a number
  } modes[] = {
      {Format::kNvfp4, Scale::kDynamicToken, "dynamic_token"},
      {Format::kNvfp4, Scale::kStatic, nullptr},
      {Format::kNvfp4, Scale::kCompat, nullptr},
      {Format::kBf16, Scale::kDynamicToken, nullptr},
      {Format::kInt8Block, Scale::kDynamicToken, "dynamic_block"},
      {Format::kFp8, Scale::kDynamicToken, "dynamic_token"},
      {Format::kFp8, Scale::kStatic, nullptr},
  };
  for (const auto& mode : modes) {
    std::vector<float> first;
    for (const Backend* backend : runnable_backends()) {
      SCOPED_TRACE(std::string(backend->name) + " " + to_string(mode.format) + " " +
                   to_string(mode.scale));
      LinearOptions options = linear_options();
      options.backend = backend->name;
      options.activation_format = mode.format;
      options.activation_scale = mode.scale;
      options.input_scale = 0.0013f;
      auto linear = NvfpLinear::open(weight.view(), options);
      ASSERT_OK(linear);
      const auto json = nlohmann::json::parse((*linear)->describe_json());
      if (mode.described != nullptr) {
        EXPECT_EQ(json["activation_scale"], mode.described);
      }
      if (mode.format == Format::kFp8) {
        EXPECT_EQ(json["fp8_weights"]["weights"], 40 * 96);
        EXPECT_GT(json["fp8_weights"]["inexact"], 0);
        EXPECT_LT(json["fp8_weights"]["inexact"], 40 * 96 / 2);
      }
      const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
      Input input(5, 40, 96);
      ASSERT_OK((*linear)->run(input.batch, workspace.data(), workspace.size_bytes()));
      if (first.empty()) first = input.out;
      const Comparison comparison = compare(first.data(), input.out.data(), 5, 40);
      EXPECT_LT(comparison.relative_l2, 1e-6);  // the same products, fp32 sums in another order
      EXPECT_EQ(comparison.nonfinite_mismatches, 0);
    }
  }
}

TEST(Linear, ResolvesItsScale) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(16, 32, 0.25f, random);
  LinearOptions options = linear_options();
  options.input_scale = 0.3f;
  const auto scale = [&] {
    return NvfpLinear::open(weight.view(), options).value()->weights().input_scale;
  };
  const auto refused = [&] { return NvfpLinear::open(weight.view(), options).status().message(); };
  options.activation_scale = ActivationScale::kStatic;
  options.static_headroom = 4.0f;
  EXPECT_EQ(scale(), 2.0f);
  options.activation_scale = ActivationScale::kCompat;
  EXPECT_THAT(refused(),
              HasSubstr("static_headroom: expected none (1) with activation_scale compat, got 4"));
  options.static_headroom = 1.0f;
  EXPECT_EQ(scale(), 0.3f);
  options.activation_format = ActivationFormat::kFp8;
  EXPECT_THAT(
      refused(),
      HasSubstr("activation_scale: expected dynamic_token or static with activation_format fp8"));
  options.activation_scale = ActivationScale::kStatic;
  EXPECT_EQ(scale(), 2.0f);  // rounded up from 1.8, since a row holds 448
  options.activation_format = ActivationFormat::kInt8Block;
  EXPECT_THAT(
      refused(),
      HasSubstr("activation_scale: expected dynamic_token with activation_format int8_block"));
}

TEST(Linear, Refuses) {
  std::mt19937 random(1);
  Matrix weight = Matrix::random(16, 32, 0.25f, random);
  const auto opening = [&](const Nvfp4View& view, const LinearOptions& options) {
    return NvfpLinear::open(view, options).status().code();
  };
  LinearOptions options = linear_options();
  options.activation_scale = ActivationScale::kStatic;  // without an input scale
  EXPECT_EQ(opening(weight.view(), options), Code::kInvalidArgument);
  options = linear_options();
  options.max_tokens = 0;
  EXPECT_EQ(opening(weight.view(), options), Code::kInvalidArgument);
  options = linear_options();
  options.backend = "fast";
  EXPECT_EQ(opening(weight.view(), options), Code::kInvalidArgument);
  Nvfp4View view = weight.view();
  view.cols = 24;
  EXPECT_EQ(opening(view, linear_options()), Code::kInvalidArgument);
  weight.block_scales[0] = 0x80;
  EXPECT_EQ(opening(weight.view(), linear_options()), Code::kBadInput);
  weight.block_scales[0] = 0x38;

  auto linear = NvfpLinear::open(weight.view(), linear_options());
  ASSERT_OK(linear);
  const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
  const auto run = [&](const LinearBatch& batch) {
    return (*linear)->run(batch, workspace.data(), workspace.size_bytes()).code();
  };
  Input input(8, 16, 32);
  EXPECT_EQ(run(input.batch), Code::kOk);
  const std::function<void(LinearBatch&)> mistakes[] = {
      [](auto& b) { b.tokens = 9; },
      [](auto& b) { b.x = nullptr; },
      [&](auto& b) { b.out = workspace.data(); },
      [](auto& b) { b.x_dtype = DType::kU8; },
  };
  for (const auto& mistake : mistakes) {
    LinearBatch batch = input.batch;
    mistake(batch);
    EXPECT_EQ(run(batch), Code::kInvalidArgument) << &mistake - mistakes;
  }
  EXPECT_EQ((*linear)->run(input.batch, workspace.data(), (*linear)->workspace_bytes() - 1).code(),
            Code::kInvalidArgument);
  const Input two(2, 16, 32);
  EXPECT_LT((*linear)->workspace_bytes(2), (*linear)->workspace_bytes());
  EXPECT_OK((*linear)->run(two.batch, workspace.data(), (*linear)->workspace_bytes(2)));
  EXPECT_EQ((*linear)->run(two.batch, workspace.data(), (*linear)->workspace_bytes(2) - 1).code(),
            Code::kInvalidArgument);
  EXPECT_EQ((*linear)->run(input.batch, nullptr, workspace.size_bytes()).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(run(LinearBatch{}), Code::kOk);  // no tokens
}

}  // namespace
}  // namespace nvfp4_moe::internal
