// The dense linear: its modes on every backend, its scales, and its refusals.
#include "moe/linear.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "judge/judge.h"
#include "moe/tiny.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using Format = ActivationFormat;
using Scale = ActivationScale;

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

Matrix weight_of(int64_t rows, int64_t cols) {
  std::mt19937 random(1);
  return Matrix::random(rows, cols, 0.25f, random);
}

// tests/layer tests the products of each backend; here all must give those of the first.
TEST(Linear, BackendsAgreeInEveryMode) {
  const Matrix weight = weight_of(40, 96);
  const struct {
    Format format;
    Scale scale;
    const char* described;  // null: a number
  } modes[] = {
      {Format::kNvfp4, Scale::kDynamicToken, "dynamic_token"},
      {Format::kNvfp4, Scale::kStatic, nullptr},
      {Format::kNvfp4, Scale::kVllmOrder, nullptr},
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
      const auto linear = must(NvfpLinear::open(weight.view(), {.backend = backend->name,
                                                                .activation_format = mode.format,
                                                                .activation_scale = mode.scale,
                                                                .input_scale = 0.0013f,
                                                                .max_tokens = 8,
                                                                .executor = &serial_executor()}));
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

TEST(Linear, ResolvesItsScaleAndRefusesOptions) {
  Matrix weight = weight_of(16, 32);
  const struct {
    Format format;
    Scale scale;
    float input_scale, headroom, expected;
    const char* words = nullptr;
  } cases[] = {
      {Format::kNvfp4, Scale::kStatic, 0.3f, 4.0f, 2.0f},
      {Format::kNvfp4, Scale::kVllmOrder, 0.3f, 1.0f, 0.3f},
      {Format::kFp8, Scale::kStatic, 0.3f, 1.0f, 2.0f},  // from 1.8, since a row holds 448
      {Format::kNvfp4, Scale::kVllmOrder, 0.3f, 4.0f, 0,
       "static_headroom: expected none (1) with activation_scale vllm_order, got 4"},
      {Format::kFp8, Scale::kVllmOrder, 0.3f, 1.0f, 0,
       "activation_scale: expected dynamic_token or static with activation_format fp8"},
      {Format::kInt8Block, Scale::kStatic, 0.3f, 1.0f, 0,
       "activation_scale: expected dynamic_token with activation_format int8_block"},
      {Format::kNvfp4, Scale::kStatic, 0, 1.0f, 0, "input_scale: expected a positive normal"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(&c - cases);
    const auto linear = NvfpLinear::open(weight.view(), {.activation_format = c.format,
                                                         .activation_scale = c.scale,
                                                         .input_scale = c.input_scale,
                                                         .static_headroom = c.headroom,
                                                         .max_tokens = 8});
    if (c.words == nullptr) {
      ASSERT_OK(linear);
      EXPECT_EQ((*linear)->weights().input_scale, c.expected);
    } else {
      EXPECT_THAT(linear, Refused(Code::kInvalidArgument, c.words));
    }
  }
  const auto opening = [](const Nvfp4View& view, const LinearOptions& options) {
    return NvfpLinear::open(view, options).status().code();
  };
  EXPECT_EQ(opening(weight.view(), {.max_tokens = 0}), Code::kInvalidArgument);
  EXPECT_EQ(opening(weight.view(), {.backend = "fast", .max_tokens = 8}), Code::kInvalidArgument);
  Nvfp4View view = weight.view();
  view.cols = 24;
  EXPECT_EQ(opening(view, {.max_tokens = 8}), Code::kInvalidArgument);
  weight.block_scales[0] = 0x80;
  EXPECT_EQ(opening(weight.view(), {.max_tokens = 8}), Code::kBadInput);
}

TEST(Linear, RefusesBadBatches) {
  const auto linear = must(NvfpLinear::open(weight_of(16, 32).view(), {.max_tokens = 8}));
  const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
  const auto run = [&](const LinearBatch& batch, size_t size_bytes) {
    return (*linear)->run(batch, workspace.data(), size_bytes).code();
  };
  Input input(8, 16, 32), two(2, 16, 32);
  EXPECT_EQ(run(input.batch, workspace.size_bytes()), Code::kOk);
  EXPECT_EQ(run(LinearBatch{}, workspace.size_bytes()), Code::kOk);  // no tokens
  const std::function<void(LinearBatch&)> mistakes[] = {
      [](auto& b) { b.tokens = 9; },
      [](auto& b) { b.x = nullptr; },
      [&](auto& b) { b.out = workspace.data(); },
      [](auto& b) { b.out = const_cast<void*>(b.x); },
      [](auto& b) { b.x_dtype = DType::kU8; },
  };
  for (const auto& mistake : mistakes) {
    LinearBatch batch = input.batch;
    mistake(batch);
    EXPECT_EQ(run(batch, workspace.size_bytes()), Code::kInvalidArgument) << &mistake - mistakes;
  }
  EXPECT_LT((*linear)->workspace_bytes(2), (*linear)->workspace_bytes());
  for (const Input* of : {&input, &two}) {
    const size_t needed = (*linear)->workspace_bytes(of->batch.tokens);
    EXPECT_EQ(run(of->batch, needed), Code::kOk);
    EXPECT_EQ(run(of->batch, needed - 1), Code::kInvalidArgument);
  }
  EXPECT_EQ((*linear)->run(input.batch, nullptr, workspace.size_bytes()).code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace nvfp4_moe::internal
