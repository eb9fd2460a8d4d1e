// Experts that calibration never reached: their weights are zeros, and the tensor scale is 0 or its reciprocal.
#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "checkpoint/checkpoint.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::dead_experts_test {
namespace {

using test::CheckpointBuilder;
using test::TempDir;

std::set<std::string> ids(const std::vector<Finding>& findings) {
  std::set<std::string> out;
  for (const Finding& finding : findings) out.insert(finding.id);
  return out;
}

// What producers write for an expert that no token reached: a tensor scale of 0, or its reciprocal, over codes of 0.
TEST(DeadExperts, AreZerosAndReported) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
    for (const float stored : {0.0f, std::numeric_limits<float>::infinity()}) {
      for (const bool codes : {false, true}) {
        SCOPED_TRACE(std::string(to_string(format)) + " " + std::to_string(stored) + (codes ? " over codes" : ""));
        CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
        for (const char* projection : {"gate", "up", "down"}) {
          auto& tensors = builder.tensors();
          std::memcpy(tensors.at(builder.tensor_name(1, 2, projection, "tensor_scale")).bytes.data(), &stored, 4);
          auto& bytes = tensors.at(builder.tensor_name(1, 2, projection, "codes")).bytes;
          std::fill(bytes.begin(), bytes.end(), uint8_t{0x80});  // -0 too is zero
          if (codes) bytes[bytes.size() - 1] = 0x01;
          auto& scales = tensors.at(builder.tensor_name(1, 2, projection, "scales")).bytes;
          std::fill(scales.begin(), scales.end(), uint8_t{0x7F});  // NaN: 0 divided by 0
        }
        TempDir dir;
        ASSERT_OK(builder.write(dir.path().string()));
        const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
        ASSERT_OK(checkpoint);
        const std::set<std::string> found = ids(*checkpoint->validate(1, {0, 8}));
        const Result<LoadedExpert> whole = checkpoint->expert(1, 2);
        // The slice's codes are 0 either way: the whole matrix is judged.
        const Result<LoadedExpert> slice = checkpoint->expert(1, 2, {0, 16});
        EXPECT_EQ(found.contains("dead_matrix"), !codes);
        EXPECT_EQ(found.contains(stored == 0 ? "tensor_scale_zero" : "tensor_scale_nonfinite"), codes);
        ASSERT_EQ(whole.ok(), !codes);
        ASSERT_EQ(slice.ok(), !codes);
        EXPECT_OK(checkpoint->expert(1, 3));
        EXPECT_OK(checkpoint->statistics(1, {0, 8}));
        if (codes) continue;
        EXPECT_EQ(whole->findings.size(), 1u);  // like ones of a layer are folded
        for (const Nvfp4View* view : {&whole->source.gate, &slice->source.up, &slice->source.down}) {
          EXPECT_EQ(view->tensor_scale, 1);
          for (int64_t r = 0; r < view->rows; ++r) {
            for (int64_t c = 0; c < view->cols / 2; ++c) ASSERT_EQ(view->row_codes(r)[c], 0);
            for (int64_t c = 0; c < view->cols / 16; ++c) ASSERT_EQ(view->row_scales(r)[c], 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::dead_experts_test
