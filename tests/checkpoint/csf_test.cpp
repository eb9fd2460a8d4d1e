// Checkpoints whose block scales are coded as CSF load with the bits of the plain ones; streams
// that are not sound are findings; containers open.
#include "core/csf.h"

#include <filesystem>
#include <fstream>

#include "checkpoint/experts.h"

namespace nvfp4_moe::internal::test::csf_checkpoint_test {
namespace {

struct Kind {
  const char* model_type;
  SourceFormat format;
};
constexpr Kind kKinds[] = {{"qwen3_moe", SourceFormat::kModelOpt},
                           {"deepseek_v4", SourceFormat::kModelOpt},
                           {"qwen3_moe", SourceFormat::kCompressedTensors},
                           {"deepseek_v4", SourceFormat::kMxfp4},
                           {"minimax_m2", SourceFormat::kMxfp4}};

// Some scales out of every row's window, and some equal ones.
void scatter_scales(CheckpointBuilder& builder) {
  for (const int64_t layer : builder.layers()) {
    for (int64_t e = 0; e < builder.options().num_experts; ++e) {
      for (const char* projection : {"gate", "up", "down"}) {
        auto& scales = builder.matrix(layer, e, projection).scales;
        for (size_t i = 0; i < scales.size(); i += 7)
          scales[i] = static_cast<uint8_t>(1 + (i * 31 + static_cast<size_t>(e)) % 120);
      }
    }
  }
}

CheckpointBuilder builder_of(const Kind& kind) {
  CheckpointBuilder builder(
      {.model_type = kind.model_type, .format = kind.format, .num_experts = 4, .shards = 2});
  scatter_scales(builder);
  return builder;
}

TEST(CsfCheckpoint, LoadsWithTheBitsOfThePlainOneWholeAndInSlices) {
  for (const Kind& kind : kKinds) {
    for (const bool flat : {false, true}) {
      SCOPED_TRACE(testing::Message() << kind.model_type << " " << to_string(kind.format) << flat);
      CheckpointBuilder builder = builder_of(kind);
      const Opened plain(builder);
      for (const int64_t layer : builder.layers()) builder.code_scales(layer, flat);
      const Opened coded(builder);
      EXPECT_FALSE(plain->model().csf);
      EXPECT_TRUE(coded->model().csf);
      EXPECT_EQ(coded->model().format, kind.format);
      uint64_t more_bytes = coded->expert_bytes() - plain->expert_bytes();  // tiny: none are saved
      EXPECT_EQ(ids(coded->findings()), ids(plain->findings()));
      for (const int64_t layer : builder.layers()) {
        for (int64_t e = 0; e < 4; ++e) {
          expect_same(coded->expert(layer, e), plain->expert(layer, e));
          for (const int64_t first : {0, 16})
            expect_same(coded->expert(layer, e, {first, 16}), plain->expert(layer, e, {first, 16}));
        }
        EXPECT_OK(coded->check_layout(layer, {0, 4}));
        EXPECT_EQ(ids(*must(coded->validate(layer, {0, 4}))),
                  ids(*must(plain->validate(layer, {0, 4}))));
        const auto ours = must(coded->statistics(layer, {0, 4}));
        const auto theirs = must(plain->statistics(layer, {0, 4}));
        EXPECT_EQ(ours->decoded_scales_bytes, theirs->scales_bytes);
        EXPECT_EQ(ours->block_scale_min, theirs->block_scale_min);
        EXPECT_EQ(ours->block_scale_max, theirs->block_scale_max);
        EXPECT_TRUE(ours->csf);
        EXPECT_FALSE(theirs->csf);
        EXPECT_EQ(theirs->decoded_scales_bytes, theirs->scales_bytes);
        EXPECT_GT(ours->csf_exceptions, 0);
        uint64_t stored = 0;
        for (const auto& [name, tensor] : builder.tensors())
          if (name.find("_csf_") != std::string::npos &&
              name.find("layers." + std::to_string(layer) + ".") != std::string::npos)
            stored += tensor.bytes.size();
        EXPECT_EQ(ours->scales_bytes, stored);
        more_bytes -= ours->scales_bytes - theirs->scales_bytes;
      }
      EXPECT_EQ(more_bytes, 0u);
    }
  }
}

TEST(CsfCheckpoint, OneLayerMayBeCodedAndAnotherPlain) {
  CheckpointBuilder builder = builder_of(kKinds[0]);
  const Opened plain(builder);
  builder.code_scales(1);
  const Opened mixed(builder);
  for (const int64_t layer : builder.layers()) {
    expect_same(mixed->expert(layer, 3), plain->expert(layer, 3));
    EXPECT_EQ(must(mixed->statistics(layer, {0, 4}))->csf, layer == 1);
  }
}

struct Fault {
  const char* part;  // of the name of expert 1's up projection
  void (*plant)(RawTensor&);
  const char *id, *words;
};

uint32_t* words_of(RawTensor& tensor) { return reinterpret_cast<uint32_t*>(tensor.bytes.data()); }

TEST(CsfCheckpoint, UnsoundStreamsAreFindingsAndRefusedAtLoad) {
  const Fault faults[] = {
      {"_exceptions", [](RawTensor& t) { std::swap(words_of(t)[0], words_of(t)[1]); },
       "csf_invalid", "exception 1: expected a position above"},
      {"_exceptions", [](RawTensor& t) { words_of(t)[1] = words_of(t)[0] ^ 0x01000000; },
       "csf_invalid", "exception 1: expected a position above"},
      {"_exceptions", [](RawTensor& t) { words_of(t)[t.shape[0] - 1] |= 0xFFFFFF; }, "csf_invalid",
       "expected a position below 128, got 16777215"},
      {"_exceptions",
       [](RawTensor& t) {
         t = {DType::kU32, {129}, std::vector<uint8_t>(4 * 129)};
       },
       "shape_mismatch", "at most 128, one for each scale, got (129) U32"},
      {"_exceptions", [](RawTensor& t) { t.dtype = DType::kI32; }, "dtype_mismatch",
       "(exceptions) U32"},
      {"_exceptions",
       [](RawTensor& t) {
         t.shape = {t.shape[0], 1};
       },
       "shape_mismatch", "U32"},
      {"_fixed", [](RawTensor& t) { t.bytes[3] = 241; }, "csf_invalid",
       "row 3: expected a base of at most 240, got 241"},
      {"_fixed", [](RawTensor& t) { t.dtype = DType::kI8; }, "dtype_mismatch", "(2, 48) U8"},
      {"_fixed",
       [](RawTensor& t) {
         t.shape = {1, 48};
         t.bytes.resize(48);
       },
       "shape_mismatch", "expected (2, 48) U8, got (1, 48) U8"},
      {"_fixed",
       [](RawTensor& t) {
         t.shape = {48, 2};
       },
       "shape_mismatch", "(48, 2) U8"},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.words);
    CheckpointBuilder builder = builder_of(kKinds[0]);
    builder.code_scales(0);
    const std::string scales = builder.tensor_name(0, 1, "up", "scales");
    fault.plant(builder.tensors().at(scales + ".nvfp4_csf" + fault.part));
    const Opened checkpoint(builder);
    EXPECT_THAT(checkpoint->expert(0, 1), Refused(Code::kBadInput, fault.words));
    EXPECT_OK(checkpoint->expert(0, 0));
    EXPECT_OK(checkpoint->expert(1, 1));
    const auto findings = must(checkpoint->validate(0, {0, 4}));
    const Finding* const finding = find(*findings, fault.id);
    ASSERT_NE(finding, nullptr);
    EXPECT_EQ(finding->severity, Severity::kError);
    EXPECT_EQ(finding->expert, 1);
    EXPECT_THAT(finding->tensor, StartsWith(scales));
    EXPECT_THAT(to_string(*finding), HasSubstr(fault.words));
    EXPECT_OK(checkpoint->statistics(0, {0, 4}));
  }
}

// Scales that NVFP4 does not have decode to themselves, and are then the findings they always are.
TEST(CsfCheckpoint, InvalidScalesAreReportedAsInAPlainFile) {
  for (const Plant fault : {Plant::kNanBlockScale, Plant::kNegativeBlockScale,
                            Plant::kZeroScaleOverCodes, Plant::kAllZeroScales}) {
    CheckpointBuilder builder = builder_of(kKinds[0]);
    builder.plant(fault, 0, 2);
    const Opened plain(builder);
    builder.code_scales(0);
    const Opened coded(builder);
    const auto ours = must(coded->validate(0, {0, 4}));
    const auto theirs = must(plain->validate(0, {0, 4}));
    ASSERT_EQ(ours->size(), theirs->size());
    for (size_t i = 0; i < ours->size(); ++i)
      EXPECT_EQ(to_string((*ours)[i]), to_string((*theirs)[i]));
  }
}

TEST(CsfCheckpoint, AStreamWithoutItsPartnerOrBesideThePlainScalesIsRefused) {
  CheckpointBuilder builder = builder_of(kKinds[0]);
  const std::string scales = builder.tensor_name(0, 0, "down", "scales");
  const RawTensor plain = builder.tensors().at(scales);
  builder.code_scales(0);
  const RawTensor fixed = builder.tensors().at(scales + ".nvfp4_csf_fixed");
  builder.tensors().erase(scales + ".nvfp4_csf_fixed");
  EXPECT_THAT(Opened(builder)->expert(0, 0),
              Refused(Code::kBadInput, scales + ".nvfp4_csf_fixed: expected a tensor"));
  builder.tensors()[scales + ".nvfp4_csf_fixed"] = fixed;
  builder.tensors()[scales] = plain;
  EXPECT_THAT(Opened(builder)->expert(0, 0),
              Refused(Code::kBadInput, "expected the scales or their streams of CSF, got both"));
}

TEST(CsfCheckpoint, StreamsOfAnotherFormatsCodecAreUnknownTensors) {
  CheckpointBuilder builder = builder_of(kKinds[0]);
  const std::string scales = builder.tensor_name(0, 0, "down", "scales");
  builder.code_scales(0);
  auto node = builder.tensors().extract(scales + ".nvfp4_csf_fixed");
  node.key() = scales + ".mxfp4_csf_fixed";
  builder.tensors().insert(std::move(node));
  EXPECT_THAT(Opened(builder)->expert(0, 1),
              Refused(Code::kUnsupported, scales + ".mxfp4_csf_fixed: a tensor that may change"));
}

// As vLLM's reader of CSF expects it.
void declare(CheckpointBuilder& builder, const char* coding) {
  nlohmann::json layers;
  for (const int64_t layer : builder.layers())
    layers["model.layers." + std::to_string(layer) + ".mlp.experts"] = {
        {"quant_algo", "NVFP4"}, {"group_size", 16}, {"weight_scale_encoding", coding}};
  builder.config()["quantization_config"] = {{"quant_method", "modelopt"},
                                             {"quant_algo", "MIXED_PRECISION"},
                                             {"quantized_layers", layers}};
  builder.hf_quant_config() = nullptr;
}

TEST(CsfCheckpoint, TheConfigMayDeclareTheCoding) {
  CheckpointBuilder builder = builder_of(kKinds[0]);
  declare(builder, "csf");
  builder.code_scales(0);
  const Opened checkpoint(builder);
  EXPECT_EQ(must(checkpoint->declared_activations(0))->format, ActivationFormat::kNvfp4);
  const Finding* const finding = find(checkpoint->findings(), "scale_coding_mismatch");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->layer, 1);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_EQ(finding->count, 1);
  declare(builder, "csf2");
  EXPECT_THAT(refusal_of_open(builder),
              Refused(Code::kUnsupported,
                      "weight_scale_encoding 'csf2' is not known; expected csf, or none"));
}

TEST(CsfCheckpoint, AServingFolderIsRefusedByName) {
  CheckpointBuilder builder = builder_of(kKinds[0]);
  builder.hf_quant_config() = nullptr;
  builder.config()["quantization_config"] = {{"quant_method", "nvfp4_csf"},
                                             {"checkpoint_root", "/models/x"}};
  EXPECT_THAT(refusal_of_open(builder),
              Refused(Code::kUnsupported, "the container that checkpoint_root names"));
}

// ---- containers

// tensors/ and metadata/ of the builder's checkpoint, with a manifest.
class Container {
 public:
  explicit Container(CheckpointBuilder& builder, nlohmann::json manifest) {
    const std::filesystem::path root = dir.path();
    EXPECT_OK(builder.write((root / "tensors").string()));
    std::filesystem::create_directory(root / "metadata");
    for (const auto& file : std::filesystem::directory_iterator(root / "tensors")) {
      const std::string name = file.path().filename().string();
      if (name.ends_with(".safetensors")) {
        manifest["shards"].push_back({{"file", name}});
      } else if (name.ends_with(".index.json")) {
        std::filesystem::remove(file.path());
      } else {
        std::filesystem::rename(file.path(), root / "metadata" / name);
      }
    }
    std::ofstream(root / "manifest.json") << manifest;
  }
  Result<Checkpoint> open() const { return Checkpoint::open(dir.path().string()); }

  const TempDir dir;
};

nlohmann::json manifest_of(CsfCodec codec) {
  const bool nvfp4 = codec == CsfCodec::kNvfp4;
  return {{"schema", nvfp4 ? "lil-nvfp4-csf-checkpoint/1" : "lil-mxfp4-csf-checkpoint/1"},
          {"codec", csf_codec_name(codec)},
          {"family", "any"},
          {"shards", nlohmann::json::array()}};
}

TEST(CsfContainer, OpensAndLoadsWithTheBitsOfItsSource) {
  for (const Kind& kind : {kKinds[1], kKinds[3]}) {
    CheckpointBuilder builder = builder_of(kind);
    const Opened plain(builder);
    for (const int64_t layer : builder.layers()) builder.code_scales(layer, true);
    const Container container(
        builder,
        manifest_of(kind.format == SourceFormat::kMxfp4 ? CsfCodec::kMxfp4 : CsfCodec::kNvfp4));
    const auto opened = must(container.open());
    for (const int64_t layer : builder.layers())
      expect_same(opened->expert(layer, 2), plain->expert(layer, 2));
  }
}

TEST(CsfContainer, AnUnknownSchemaOrCodecAndAMissingShardAreRefused) {
  CheckpointBuilder builder = builder_of(kKinds[1]);
  nlohmann::json manifest = manifest_of(CsfCodec::kNvfp4);
  manifest["codec"] = "other/2";
  EXPECT_THAT(Container(builder, manifest).open(),
              Refused(Code::kUnsupported, "codec: expected byte-window4-fixed-stream-u24-"));
  manifest = manifest_of(CsfCodec::kNvfp4);
  manifest["schema"] = "lil-nvfp4-csf-checkpoint/2";
  EXPECT_THAT(Container(builder, manifest).open(),
              Refused(Code::kUnsupported, "schema 'lil-nvfp4-csf-checkpoint/2' is not known"));
  manifest = manifest_of(CsfCodec::kNvfp4);
  manifest["shards"].push_back({{"file", "model-00003-of-00003.safetensors"}});
  EXPECT_THAT(Container(builder, manifest).open(),
              Refused(Code::kBadInput, "got 'model-00003-of-00003.safetensors', which is not"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::csf_checkpoint_test
