// GGUF as a checkpoint. tests/python/test_gguf.py compares the values with the gguf package's.
#include <cstring>
#include <filesystem>
#include <functional>

#include "checkpoint/experts.h"
#include "nvfp4_moe/nvfp4_moe.hpp"
#include "support/attack.h"
#include "support/gguf_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kHidden = 128, kIntermediate = 64;
constexpr size_t kUp = 3;  // of gguf_model's tensors of a layer; its scales follow it
constexpr size_t kExpertBytes = kIntermediate * kHidden / 64 * 36;

Result<Checkpoint> opened(const TempDir& dir, const GgufBuilder& builder) {
  write_file(dir.file("model.gguf"), builder.bytes());
  return must(Checkpoint::open(dir.file("model.gguf")));
}

// Layer 0's up tensors of the model.
struct UpTensors {
  std::string &blocks, &scale, &input_scale;
  void set(std::string& scalars, float value) { std::memcpy(scalars.data() + 4, &value, 4); }
};
struct Fault {
  const char* id;
  Severity severity;
  const char* tensor;
  std::function<void(UpTensors)> plant;  // into expert 1's values
};
const Fault kFaults[] = {
    {"block_scale_nan", Severity::kError, "blk.0.ffn_up_exps.weight",
     [](UpTensors up) { up.blocks[kExpertBytes + 36 + 2] = 0x7F; }},
    {"block_scale_negative", Severity::kError, "blk.0.ffn_up_exps.weight",
     [](UpTensors up) { up.blocks[kExpertBytes] = static_cast<char>(0x81); }},
    {"zero_scale_nonzero_codes", Severity::kWarning, "blk.0.ffn_up_exps.weight",
     [](UpTensors up) {
       up.blocks[kExpertBytes + 3] = 0;
       up.blocks[kExpertBytes + 4 + 3 * 8] = 0x77;
     }},
    {"all_zero_block_scales", Severity::kError, "blk.0.ffn_up_exps.weight",
     [](UpTensors up) {
       for (size_t b = 0; b < kExpertBytes; b += 36)
         std::memset(up.blocks.data() + kExpertBytes + b, 0, 4);
     }},
    {"reciprocal_scale_direction", Severity::kError, "blk.0.ffn_up_exps.scale",
     [](UpTensors up) { up.set(up.scale, 1e4f); }},
    {"tensor_scale_zero", Severity::kError, "blk.0.ffn_up_exps.scale",
     [](UpTensors up) { up.set(up.scale, 0.0f); }},
    {"input_scale_zero", Severity::kWarning, "blk.0.ffn_up_exps.input_scale",
     [](UpTensors up) { up.set(up.input_scale, 0.0f); }},
};

ATTACK_TEST(kPlantedFaults, GgufFault, IsToldByItsOwnId) {
  for (const Fault& fault : kFaults) {
    SCOPED_TRACE(fault.id);
    GgufBuilder builder = gguf_model();
    auto& tensors = builder.tensors();
    ASSERT_EQ(tensors[kUp].name, "blk.0.ffn_up_exps.weight");
    fault.plant({tensors[kUp].bytes, tensors[kUp + 1].bytes, tensors[kUp + 2].bytes});
    TempDir dir;
    const auto checkpoint = opened(dir, builder);
    attacked();
    const auto found = [&](int64_t layer) {
      std::vector<Finding> findings = *must(checkpoint->validate(layer, {}));
      std::erase_if(findings,
                    [](const Finding& one) { return one.id == "gate_up_scale_mismatch"; });
      return findings;
    };
    EXPECT_THAT(found(1), IsEmpty());
    const std::vector<Finding> findings = found(0);
    ASSERT_EQ(ids(findings), std::set<std::string>{fault.id});
    EXPECT_EQ(findings[0].severity, fault.severity);
    EXPECT_EQ(findings[0].expert, 1);
    EXPECT_EQ(findings[0].tensor, fault.tensor);
    EXPECT_EQ(checkpoint->expert(0, 1).ok(), fault.severity != Severity::kError);
    EXPECT_OK(checkpoint->expert(0, 0));
    EXPECT_OK(checkpoint->expert(1, 1));
  }
}

TEST(Gguf, SlicesHaveTheBytesOfTheWhole) {
  for (const uint32_t type : {GgufBuilder::kNvfp4, GgufBuilder::kMxfp4}) {
    TempDir dir;
    const auto checkpoint = opened(dir, gguf_model({.type = type, .intermediate = 192}));
    const auto whole = must(checkpoint->expert(1, 2));
    for (const IntermediateSlice slice :
         {IntermediateSlice{0, 64}, {16, 16}, {48, 96}, {176, 16}}) {
      const auto part = must(checkpoint->expert(1, 2, slice));
      const int64_t first = slice.first, last = first + slice.count;
      EXPECT_EQ(codes_of(part->source.down),
                cut(codes_of(whole->source.down), 96, 0, kHidden, first / 2, last / 2));
      EXPECT_EQ(codes_of(part->source.gate),
                cut(codes_of(whole->source.gate), 64, first, last, 0, 64));
    }
    EXPECT_EQ(checkpoint->expert(1, 2, {8, 16}).status().code(), Code::kInvalidArgument);
  }
}

TEST(Gguf, MatricesLargerThanOneReadAreWhole) {
  TempDir dir;
  GgufBuilder builder =
      gguf_model({.experts = 2, .hidden = 2048, .intermediate = 1024, .layers = 1});
  const auto checkpoint = opened(dir, builder);
  const auto loaded = must(checkpoint->expert(0, 1));
  const char* block = builder.tensors()[kUp].bytes.data() + 1024 * (2048 / 64 * 36);
  for (int64_t r = 0; r < 1024; ++r) {
    for (int64_t b = 0; b < 2048 / 64; ++b, block += 36) {
      ASSERT_EQ(std::memcmp(loaded->source.up.row_scales(r) + b * 4, block, 4), 0) << r << " " << b;
      ASSERT_EQ(loaded->source.up.row_codes(r)[b * 32] & 15, block[4] & 15);
      ASSERT_EQ(loaded->source.up.row_codes(r)[b * 32 + 31] >> 4, block[35] >> 4 & 15);
    }
  }
}

ATTACK_TEST(kTruncations, Gguf, AFileThatWasCutIsAnError) {
  for (const uint32_t type : {GgufBuilder::kNvfp4, GgufBuilder::kMxfp4}) {
    TempDir dir;
    const auto checkpoint = opened(dir, gguf_model({.type = type}));
    const std::string path = dir.file("model.gguf");
    const auto whole = std::filesystem::file_size(path);
    for (const uintmax_t size : {whole - 1, whole / 2, uintmax_t{100}, uintmax_t{0}}) {
      std::filesystem::resize_file(path, size);
      attacked();
      for (int64_t e = 0; e < 4; ++e)
        EXPECT_THAT(checkpoint->expert(1, e).status().message(), HasSubstr(path));
      EXPECT_EQ(checkpoint->validate(1, {}).status().code(), Code::kIo);
      EXPECT_EQ(checkpoint->statistics(1, {}).status().code(), Code::kIo);
    }
  }
}

ATTACK_TEST(kHostileFiles, Gguf, AConfigThatDeclaresMoreThanTheFileHoldsIsTold) {
  const char* const kFields[] = {"expert_count", "embedding_length", "block_count",
                                 "expert_feed_forward_length"};
  TempDir dir;
  GgufBuilder model = gguf_model();
  for (const std::string field : kFields) {
    for (const uint32_t value : {0u, 1u << 14, 1u << 16, 1u << 20, ~0u}) {
      GgufBuilder builder;
      for (const char* other : kFields)
        builder.number(std::string("qwen3moe.") + other, other == field ? value
                                                         : other == std::string("block_count")
                                                             ? 2
                                                             : 64);
      builder.text("general.architecture", "qwen3moe").number("qwen3moe.expert_used_count", 1);
      for (const auto& tensor : model.tensors())
        builder.tensor(tensor.name, tensor.shape, tensor.type, tensor.bytes);
      write_file(dir.file("model.gguf"), builder.bytes());
      attacked();
      const auto checkpoint = Checkpoint::open(dir.file("model.gguf"));
      if (!checkpoint.ok()) {
        EXPECT_EQ(checkpoint.status().code(), Code::kBadInput);
        continue;
      }
      EXPECT_FALSE(checkpoint->check_layout(0, {}).ok()) << field << " " << value;
      EXPECT_FALSE(checkpoint->expert(0, 0).ok());
      EXPECT_LE(must(checkpoint->validate(0, {}))->size(), 8u);
    }
  }
}

TEST(Gguf, ThePathsOfOneModelAreTheSame) {
  TempDir dir;
  write_file(dir.file("model.gguf"), gguf_model().bytes());
  for (const std::string& path : {dir.path().string(), dir.file("model.gguf")}) {
    const auto checkpoint = must(Checkpoint::open(path));
    EXPECT_EQ(checkpoint->index().directory(), dir.path().string());
    EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(checkpoint->tensor_name(1, 2, "up"), "blk.1.ffn_up_exps.weight");
    EXPECT_EQ(checkpoint->expert_bytes(), 2 * 3 * (4 * kExpertBytes + 2 * 4 * sizeof(float)));
  }
  EXPECT_THAT(Checkpoint::open(dir.path().string(), {.family = "qwen3_moe"}),
              Refused(Code::kInvalidArgument, "family: expected none for a GGUF file"));
  // safetensors in the same directory take precedence: the directory is their model's.
  write_file(dir.file("model.safetensors"), "");
  EXPECT_THAT(Checkpoint::open(dir.path().string()).status().message(),
              HasSubstr("model.safetensors"));
  EXPECT_OK(Checkpoint::open(dir.file("model.gguf")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
