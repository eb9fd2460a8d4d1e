// Checks of loaded experts and of findings, for tests of checkpoints.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// The bytes of a matrix's codes and block scales, row after row.
inline std::vector<uint8_t> codes_of(const Nvfp4View& view) {
  std::vector<uint8_t> out;
  for (int64_t r = 0; r < view.rows; ++r)
    out.insert(out.end(), view.row_codes(r), view.row_codes(r) + view.cols / 2);
  return out;
}
inline std::vector<uint8_t> scales_of(const Nvfp4View& view) {
  std::vector<uint8_t> out;
  for (int64_t r = 0; r < view.rows; ++r)
    out.insert(out.end(), view.row_scales(r), view.row_scales(r) + view.cols / 16);
  return out;
}

// Rows [r0, r1) and columns [c0, c1) of a byte matrix with `width` bytes a row, `per` elements a
// byte.
inline std::vector<uint8_t> cut(const std::vector<uint8_t>& in, int64_t width, int64_t r0,
                                int64_t r1, int64_t c0, int64_t c1) {
  std::vector<uint8_t> out;
  for (int64_t r = r0; r < r1; ++r)
    out.insert(out.end(), in.begin() + r * width + c0, in.begin() + r * width + c1);
  return out;
}

inline uint64_t read_all(const LoadedExpert& loaded) {
  uint64_t sum = 0;
  for (const Nvfp4View* view : {&loaded.source.gate, &loaded.source.up, &loaded.source.down})
    for (const auto& bytes : {codes_of(*view), scales_of(*view)})
      sum = std::accumulate(bytes.begin(), bytes.end(), sum);
  return sum;
}

inline void expect_same(const Nvfp4View& ours, const Nvfp4View& theirs) {
  EXPECT_EQ(ours.rows, theirs.rows);
  EXPECT_EQ(ours.cols, theirs.cols);
  EXPECT_EQ(codes_of(ours), codes_of(theirs));
  EXPECT_EQ(scales_of(ours), scales_of(theirs));
  EXPECT_EQ(ours.tensor_scale, theirs.tensor_scale);
}
inline void expect_same(const Result<LoadedExpert>& ours, const Result<LoadedExpert>& theirs) {
  ASSERT_OK(ours);
  ASSERT_OK(theirs);
  expect_same(ours->source.gate, theirs->source.gate);
  expect_same(ours->source.up, theirs->source.up);
  expect_same(ours->source.down, theirs->source.down);
}

inline void expect_same(const Nvfp4View& view, const BuiltMatrix& built) {
  EXPECT_EQ(codes_of(view), built.codes);
  EXPECT_EQ(scales_of(view), built.scales);
  EXPECT_EQ(view.tensor_scale, built.tensor_scale);
}
inline void expect_same(const Result<LoadedExpert>& ours, CheckpointBuilder& builder, int64_t layer,
                        int64_t expert) {
  ASSERT_OK(ours);
  expect_same(ours->source.gate, builder.matrix(layer, expert, "gate"));
  expect_same(ours->source.up, builder.matrix(layer, expert, "up"));
  expect_same(ours->source.down, builder.matrix(layer, expert, "down"));
}

inline const Finding* find(const std::vector<Finding>& findings, const std::string& id) {
  for (const Finding& finding : findings)
    if (finding.id == id) return &finding;
  return nullptr;
}
inline std::set<std::string> ids(const std::vector<Finding>& findings) {
  std::set<std::string> out;
  for (const Finding& finding : findings) out.insert(finding.id);
  return out;
}

// (stack, rows, cols) of two-byte elements to (stack, cols, rows).
inline void turn_stack(RawTensor& tensor) {
  const int64_t stack = tensor.shape[0], rows = tensor.shape[1], cols = tensor.shape[2];
  const std::vector<uint8_t> in = tensor.bytes;
  for (int64_t e = 0; e < stack; ++e)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        for (int64_t b = 0; b < 2; ++b)
          tensor.bytes[static_cast<size_t>(2 * ((e * cols + c) * rows + r) + b)] =
              in[static_cast<size_t>(2 * ((e * rows + r) * cols + c) + b)];
  std::swap(tensor.shape[1], tensor.shape[2]);
}

// Rows of gate and up of one expert in one tensor.
inline std::vector<uint8_t> joined(const std::vector<uint8_t>& gate, const std::vector<uint8_t>& up,
                                   size_t row_bytes, GateUpOrder order) {
  const auto& first = order == GateUpOrder::kUpFirst ? up : gate;
  const auto& second = order == GateUpOrder::kUpFirst ? gate : up;
  const size_t step = order == GateUpOrder::kInterleaved ? row_bytes : first.size();
  std::vector<uint8_t> out;
  for (size_t at = 0; at < first.size(); at += step)
    for (const auto* from : {&first, &second})
      out.insert(out.end(), from->begin() + static_cast<int64_t>(at),
                 from->begin() + static_cast<int64_t>(at + step));
  return out;
}

// Takes one part of all experts of a layer out of the builder, as one tensor: (experts, rows, cols)
// or (experts) of a projection; with twice the rows, or (experts, 2), if up's follow in this order.
inline RawTensor take_stack(CheckpointBuilder& builder, int64_t layer, const char* projection,
                            const char* part, std::optional<GateUpOrder> with_up = {}) {
  const auto take = [&](int64_t expert, const char* of) {
    auto node = builder.tensors().extract(builder.tensor_name(layer, expert, of, part));
    return node.empty() ? RawTensor() : node.mapped();
  };
  RawTensor stack;
  const int64_t experts = builder.options().num_experts;
  for (int64_t e = 0; e < experts; ++e) {
    RawTensor one = take(e, projection);
    if (one.bytes.empty()) return one;  // the format has no such part
    const bool scalar = one.shape.size() < 2;
    if (scalar) one.shape = {1};
    if (with_up) {
      const size_t row_bytes = one.bytes.size() / static_cast<size_t>(one.shape[0]);
      one.bytes = joined(one.bytes, take(e, "up").bytes, row_bytes, *with_up);
      one.shape[0] *= 2;
    }
    stack.dtype = one.dtype;
    stack.shape = scalar && !with_up ? std::vector<int64_t>() : one.shape;
    stack.bytes.insert(stack.bytes.end(), one.bytes.begin(), one.bytes.end());
  }
  stack.shape.insert(stack.shape.begin(), experts);
  return stack;
}

// All experts of a layer as `<stem>.w13_<part>` and `<stem>.w2_<part>`. gate and up keep a tensor
// scale each.
inline void stack_layer(CheckpointBuilder& builder, int64_t layer, GateUpOrder order) {
  for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
    const std::string name = builder.tensor_name(layer, 0, "gate", part);
    const std::string stem = name.substr(0, name.find(".experts.") + 9);
    const std::string suffix = name.substr(name.rfind('.') + 1);
    const RawTensor both = take_stack(builder, layer, "gate", part, order);
    if (both.bytes.empty()) continue;
    builder.tensors()[stem + "w13_" + suffix] = both;
    builder.tensors()[stem + "w2_" + suffix] = take_stack(builder, layer, "down", part);
  }
}

inline void stack_experts(CheckpointBuilder& builder, GateUpOrder order) {
  for (const int64_t layer : builder.layers()) stack_layer(builder, layer, order);
}

}  // namespace nvfp4_moe::internal::test
