// Quantizing a checkpoint: the written files, resuming, refusals.
#include "convert/quantize_checkpoint.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/float_experts.h"
#include "convert/synthesize.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

SynthesizeOptions tiny(const std::string& family = "deepseek_v4") {
  return {.family = family,
          .layers = 2,
          .num_experts = 4,
          .top_k = 2,
          .hidden_size = 128,
          .intermediate_size = 64,
          .vocab_size = 32,
          .max_shard_bytes = 100 << 10};
}

std::string bytes_of(const TensorIndex& index, const std::string& name) {
  const TensorIndex::Ref ref = index.find(name);
  if (ref.info == nullptr) return "missing " + name;
  const std::vector<char> bytes = read_tensor<char>(*ref.file, *ref.info);
  return {bytes.begin(), bytes.end()};
}

float scalar_of(const TensorIndex& index, const std::string& name) {
  const std::string bytes = bytes_of(index, name);
  EXPECT_EQ(bytes.size(), 4u) << name;
  float value = 0;
  std::memcpy(&value, bytes.data(), std::min<size_t>(4, bytes.size()));
  return value;
}

class QuantizeCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(in(), tiny()));
    std::ofstream(dir_.file("in/tokenizer.json")) << "{}";
    fs::create_directories(dir_.file("in/encoding"));
    std::ofstream(dir_.file("in/encoding/a.py")) << "pass";
    std::ofstream(dir_.file("in/pytorch_model.bin")) << "weights";
  }
  std::string in() const { return dir_.file("in"); }
  std::string out() const { return dir_.file("out"); }
  TempDir dir_;
};

TEST_F(QuantizeCheckpoint, WritesWhatTheQuantizerGivesAndCopiesTheRest) {
  for (const OutputFormat format : {OutputFormat::kModelOpt, OutputFormat::kCompressedTensors}) {
    const bool ct = format == OutputFormat::kCompressedTensors;
    const std::string where = dir_.file(ct ? "ct" : "mo");
    QuantizeOptions options;
    options.format = format;
    options.max_shard_bytes = 64 << 10;
    const auto result = must(quantize_checkpoint(in(), where, options));
    EXPECT_EQ(result->quantized_tensors, 2 * 4 * 3);
    EXPECT_GT(result->shards, 2);
    EXPECT_EQ(result->copied_files, (std::vector<std::string>{"encoding/a.py", "tokenizer.json"}));
    EXPECT_FALSE(result->notes.empty());

    const auto source = must(Checkpoint::open(in())), target = must(Checkpoint::open(where));
    EXPECT_EQ(target->model().format,
              ct ? SourceFormat::kCompressedTensors : SourceFormat::kModelOpt);
    EXPECT_EQ(target->model().family, "deepseek_v4");
    for (const Finding& f : target->findings())
      EXPECT_NE(f.severity, Severity::kError) << to_string(f);
    const TensorIndex& index = target->index();
    QuantizationQuality gate;
    for (int64_t e = 0; e < 4; ++e) {
      auto floats = must(float_expert(*source, 1, e));
      for (FloatWeights* matrix : {&floats->gate, &floats->up, &floats->down})
        ASSERT_OK(matrix->fetch());
      const auto loaded = must(target->expert(1, e));
      float amax_gate_up = 0, amax_down = 0;
      const std::vector<float> empty;
      const auto values = [](const FloatWeights& m) {
        std::vector<float> x(static_cast<size_t>(m.rows * m.cols));
        for (int64_t r = 0; r < m.rows; ++r) m.read_row(r, x.data() + r * m.cols);
        return x;
      };
      const std::vector<float> x[] = {values(floats->gate), values(floats->up),
                                      values(floats->down)};
      for (size_t p = 0; p < 2; ++p) amax_gate_up = std::max(amax_gate_up, row_amax(x[p]));
      amax_down = row_amax(x[2]);
      const char* words[] = {"w1", "w3", "w2"};
      for (size_t p = 0; p < 3; ++p) {
        const std::string base = "layers.1.ffn.experts." + std::to_string(e) + "." + words[p] + ".";
        const int64_t cols = p == 2 ? 64 : 128, rows = p == 2 ? 128 : 64;
        const float s = tensor_scale_from_amax(p == 2 ? amax_down : amax_gate_up);
        std::vector<uint8_t> codes(x[p].size() / 2), scales(x[p].size() / 16);
        QuantizationQuality q;
        ASSERT_OK(quantize_weights(x[p], rows, cols, s, ScaleSearch::kMax, codes.data(),
                                   scales.data(), q.counts, &q.sum_sq, &q.sum_sq_error));
        if (p == 0) gate += q;
        EXPECT_EQ(bytes_of(index, base + (ct ? "weight_packed" : "weight")),
                  std::string(codes.begin(), codes.end()));
        EXPECT_EQ(bytes_of(index, base + "weight_scale"),
                  std::string(scales.begin(), scales.end()));
        if (ct) {
          EXPECT_FLOAT_EQ(scalar_of(index, base + "weight_global_scale") * s, 1.0f);
          EXPECT_EQ(scalar_of(index, base + "input_global_scale"), 1.0f);
          EXPECT_EQ(index.find(base + "weight_global_scale").info->shape,
                    (std::vector<int64_t>{1}));
        } else {
          EXPECT_EQ(scalar_of(index, base + "weight_scale_2"), s);
          EXPECT_EQ(scalar_of(index, base + "input_scale"), 1.0f);
          EXPECT_TRUE(index.find(base + "weight_scale_2").info->shape.empty());
        }
        EXPECT_EQ(index.find(base + (ct ? "weight" : "weight_packed")).info, nullptr);
      }
      EXPECT_NEAR(loaded->source.down.tensor_scale, tensor_scale_from_amax(amax_down),
                  1e-6f * loaded->source.down.tensor_scale);
    }
    ASSERT_EQ(result->layers.size(), 2u);
    EXPECT_EQ(result->layers[1].experts, 4);
    EXPECT_NEAR(result->layers[1].gate.sqnr_db(), gate.sqnr_db(), 1e-9);
    EXPECT_GT(result->mean_sqnr_db(), 18.0);
    EXPECT_LT(result->mean_sqnr_db(), 24.0);

    int64_t copied = 0;
    for (const auto& [name, ref] : source->index().tensors()) {
      if (name.find(".experts.") != std::string::npos && name.find("shared") == std::string::npos)
        continue;
      ++copied;
      EXPECT_EQ(bytes_of(index, name), bytes_of(source->index(), name)) << name;
      EXPECT_EQ(index.find(name).info->dtype, ref.info->dtype);
      EXPECT_EQ(index.find(name).info->shape, ref.info->shape);
    }
    EXPECT_EQ(result->copied_tensors, copied);
    EXPECT_EQ(read_file(where + "/tokenizer.json"), "{}");
    EXPECT_FALSE(fs::exists(where + "/quantize.plan.json"));
    EXPECT_FALSE(fs::exists(where + "/quantize.stats.jsonl"));
    EXPECT_EQ(fs::exists(where + "/hf_quant_config.json"), !ct);
    EXPECT_FALSE(fs::exists(where + "/pytorch_model.bin"))
        << "other weights would contradict the new ones";
    EXPECT_TRUE(json::accept(to_json(*result)));
  }
}

TEST_F(QuantizeCheckpoint, ConfigsAreWhatEnginesRead) {
  ASSERT_OK(quantize_checkpoint(in(), out()));
  json config = json::parse(read_file(out() + "/config.json"));
  const json q = config.at("quantization_config");
  EXPECT_EQ(q.at("quant_method"), "fp8");
  EXPECT_EQ(q.at("moe_quant_algo"), "NVFP4");
  EXPECT_EQ(q.at("weight_block_size"), json({128, 128}));
  EXPECT_EQ(q.at("quantized_layers").at("layers.1.ffn.experts").at("quant_algo"), "NVFP4");
  const json kept = q.at("modules_to_not_convert");
  EXPECT_NE(std::find(kept.begin(), kept.end(), "layers.0.attn.wq_a"), kept.end());
  EXPECT_NE(std::find(kept.begin(), kept.end(), "layers.1.ffn.shared_experts.w2"), kept.end());
  EXPECT_NE(std::find(kept.begin(), kept.end(), "head"), kept.end());
  config.erase("quantization_config");
  config.erase("expert_dtype");
  EXPECT_EQ(config, json::parse(read_file(in() + "/config.json"))) << "the rest stays";
  const json hf = json::parse(read_file(out() + "/hf_quant_config.json")).at("quantization");
  EXPECT_EQ(hf.at("quant_algo"), "MIXED_PRECISION");
  EXPECT_EQ(hf.at("group_size"), 16);
  EXPECT_TRUE(hf.at("kv_cache_quant_algo").is_null());
  EXPECT_TRUE(hf.at("quantized_layers").contains("layers.0.ffn.experts.3.w2"));
  EXPECT_EQ(hf.at("quantized_layers").size(), 24u);
}

TEST_F(QuantizeCheckpoint, QwenConfigsNameWhatIsNotQuantized) {
  ASSERT_OK(synthesize_checkpoint(dir_.file("qwen"), tiny("qwen3_moe")));
  QuantizeOptions options;
  options.layers = {1};
  ASSERT_OK(quantize_checkpoint(dir_.file("qwen"), dir_.file("mo"), options));
  const json config = json::parse(read_file(dir_.file("mo/config.json"))).at("quantization_config");
  EXPECT_EQ(config.at("quant_method"), "modelopt");
  EXPECT_EQ(config.at("quant_algo"), "NVFP4");
  EXPECT_EQ(config.at("config_groups").at("group_0").at("weights").at("group_size"), 16);
  const json ignore = config.at("ignore");
  for (const char* name : {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj",
                           "model.layers.0.mlp.experts*"})
    EXPECT_NE(std::find(ignore.begin(), ignore.end(), name), ignore.end()) << name;
  for (const json& name : ignore)
    EXPECT_EQ(name.get<std::string>().find("layers.1.mlp.experts"), std::string::npos);
  EXPECT_EQ(json::parse(read_file(dir_.file("mo/hf_quant_config.json")))
                .at("quantization")
                .at("exclude_modules"),
            ignore);

  options.format = OutputFormat::kCompressedTensors;
  ASSERT_OK(quantize_checkpoint(dir_.file("qwen"), dir_.file("ct"), options));
  const json ct = json::parse(read_file(dir_.file("ct/config.json"))).at("quantization_config");
  EXPECT_EQ(ct.at("quant_method"), "compressed-tensors");
  EXPECT_EQ(ct.at("format"), "nvfp4-pack-quantized");
  const json group = ct.at("config_groups").at("group_0");
  EXPECT_EQ(group.at("weights").at("strategy"), "tensor_group");
  EXPECT_EQ(group.at("weights").at("dynamic"), false);
  EXPECT_EQ(group.at("input_activations").at("dynamic"), "local");
  const json patterns = ct.at("ignore");
  EXPECT_NE(std::find(patterns.begin(), patterns.end(), "re:^model\\.layers\\.0\\.mlp\\.experts.*"),
            patterns.end());

  // The excluded layer is byte for byte the source's.
  const auto a = must(TensorIndex::open(dir_.file("qwen"))),
             b = must(TensorIndex::open(dir_.file("mo")));
  const std::string name = "model.layers.0.mlp.experts.2.up_proj.weight";
  EXPECT_EQ(bytes_of(*a, name), bytes_of(*b, name));
  EXPECT_NE(b->find("model.layers.1.mlp.experts.2.up_proj.weight_scale_2").info, nullptr);
}

TEST_F(QuantizeCheckpoint, ResumesWhereItStoppedWithTheSameBytes) {
  QuantizeOptions options;
  options.max_shard_bytes = 48 << 10;
  ASSERT_OK(quantize_checkpoint(in(), dir_.file("whole"), options));
  const auto whole = must(quantize_checkpoint(in(), dir_.file("whole2"), options));
  EXPECT_EQ(read_files(dir_.file("whole")), read_files(dir_.file("whole2")));

  // Stopped at every eighth step, each time a little later.
  int64_t stop_after = 8, runs = 0, quantized_again = 0;
  options.progress = [&](const Progress& p) { return p.done < stop_after; };
  for (;; stop_after += 8, ++runs) {
    ASSERT_LT(runs, 100);
    const auto result = quantize_checkpoint(in(), out(), options);
    if (!result.ok()) {
      ASSERT_EQ(result.status().code(), Code::kCancelled) << result.status().message();
      EXPECT_FALSE(fs::exists(out() + "/config.json"))
          << "unfinished, but has a checkpoint's config";
      continue;
    }
    quantized_again += result->shards - result->resumed_shards;
    EXPECT_GT(result->resumed_shards, 0);
    EXPECT_DOUBLE_EQ(result->mean_sqnr_db(), whole->mean_sqnr_db())
        << "shards of earlier runs are in the report";
    EXPECT_EQ(result->layers[0].gate.counts.blocks, whole->layers[0].gate.counts.blocks);
    break;
  }
  EXPECT_GT(runs, 3);
  EXPECT_LT(quantized_again, whole->shards);
  EXPECT_EQ(read_files(out()), read_files(dir_.file("whole")));
}

TEST_F(QuantizeCheckpoint, AnotherPlanDoesNotResume) {
  QuantizeOptions options;
  options.max_shard_bytes = 48 << 10;
  options.progress = [](const Progress& p) { return p.done < 30; };
  ASSERT_EQ(quantize_checkpoint(in(), out(), options).status().code(), Code::kCancelled);
  const auto refused = [&](auto change, const char* word) {
    QuantizeOptions other = options;
    other.progress = {};
    change(other);
    const Status status = quantize_checkpoint(in(), out(), other).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  refused([](QuantizeOptions& o) { o.search = ScaleSearch::kSweep; }, "search");
  refused([](QuantizeOptions& o) { o.format = OutputFormat::kCompressedTensors; }, "format");
  refused([](QuantizeOptions& o) { o.layers = {0}; }, "layers");
  refused([](QuantizeOptions& o) { o.share_gate_up_scale = false; }, "share_gate_up_scale");
  refused([](QuantizeOptions& o) { o.reading.gate_up_order = GateUpOrder::kUpFirst; },
          "gate_up_order");
  refused([](QuantizeOptions& o) { o.input_scales[0] = {0.5f, 0.5f}; }, "input_scales");
  // A changed source: one weight, same size, later mtime.
  const auto index = must(TensorIndex::open(in()));
  const TensorIndex::Ref ref = index->find("layers.0.ffn.experts.0.w1.weight");
  {
    std::fstream file(ref.file->path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(ref.file->data_offset() + ref.info->begin));
    file.put('\x01');
  }
  fs::last_write_time(ref.file->path(),
                      fs::last_write_time(ref.file->path()) + std::chrono::seconds(2));
  refused([](QuantizeOptions&) {}, "files");
}

TEST_F(QuantizeCheckpoint, RefusesWhatItCannotDo) {
  const auto code = [&](const std::string& from, const std::string& to,
                        const QuantizeOptions& o = {}) {
    return quantize_checkpoint(from, to, o).status().code();
  };
  EXPECT_EQ(code(in(), in()), Code::kInvalidArgument);
  EXPECT_EQ(code(in(), in() + "/inside"), Code::kInvalidArgument);
  EXPECT_NE(code(dir_.file("nowhere"), out()), Code::kOk);
  QuantizeOptions wrong_layer;
  wrong_layer.layers = {7};
  EXPECT_EQ(code(in(), out(), wrong_layer), Code::kInvalidArgument);
  QuantizeOptions bad_scale;
  bad_scale.input_scales[0] = {0.0f, 1.0f};
  EXPECT_EQ(code(in(), out(), bad_scale), Code::kInvalidArgument);
  EXPECT_FALSE(fs::exists(out()));
  ASSERT_EQ(code(in(), out()), Code::kOk);
  EXPECT_EQ(code(in(), out()), Code::kInvalidArgument) << "finished";
  EXPECT_EQ(code(out(), dir_.file("again")), Code::kUnsupported) << "NVFP4 already";
}

TEST_F(QuantizeCheckpoint, NonFiniteWeightIsNamed) {
  const auto index = must(TensorIndex::open(in()));
  const TensorIndex::Ref ref = index->find("layers.1.ffn.experts.2.w3.weight");
  {
    std::fstream file(ref.file->path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(ref.file->data_offset() + ref.info->begin +
                                           2 * (40 * 128 + 17)));
    file.write("\x80\x7f", 2);  // +Inf
  }
  const Status status = quantize_checkpoint(in(), out()).status();
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_NE(status.message().find("layers.1.ffn.experts.2.w3.weight (40, 17)"), std::string::npos)
      << status.message();
}

TEST_F(QuantizeCheckpoint, OptionsChangeWhatTheySay) {
  QuantizeOptions options;
  const auto max = quantize_checkpoint(in(), dir_.file("max"), options);
  options.search = ScaleSearch::kMse;
  options.share_gate_up_scale = false;
  options.input_scales[1] = {0.25f, 0.125f};
  const auto pool = make_thread_pool(3);
  options.executor = pool.get();
  const auto mse = quantize_checkpoint(in(), dir_.file("mse"), options);
  ASSERT_OK(max);
  ASSERT_OK(mse);
  EXPECT_GT(mse->mean_sqnr_db(), max->mean_sqnr_db() + 0.2);
  const auto a = must(TensorIndex::open(dir_.file("max"))),
             b = must(TensorIndex::open(dir_.file("mse")));
  const std::string base = "layers.1.ffn.experts.0.";
  EXPECT_EQ(scalar_of(*a, base + "w1.weight_scale_2"), scalar_of(*a, base + "w3.weight_scale_2"));
  EXPECT_NE(scalar_of(*b, base + "w1.weight_scale_2"), scalar_of(*b, base + "w3.weight_scale_2"));
  EXPECT_EQ(scalar_of(*b, base + "w1.input_scale"), 0.25f);
  EXPECT_EQ(scalar_of(*b, base + "w3.input_scale"), 0.25f);
  EXPECT_EQ(scalar_of(*b, base + "w2.input_scale"), 0.125f);
  EXPECT_EQ(scalar_of(*b, "layers.0.ffn.experts.0.w2.input_scale"), 1.0f);
}

TEST_F(QuantizeCheckpoint, ThreadsChangeNoByte) {
  ASSERT_OK(quantize_checkpoint(in(), dir_.file("one")));
  const auto pool = make_thread_pool(4);
  QuantizeOptions options;
  options.executor = pool.get();
  ASSERT_OK(quantize_checkpoint(in(), dir_.file("four"), options));
  EXPECT_EQ(read_files(dir_.file("one")), read_files(dir_.file("four")));
}

TEST_F(QuantizeCheckpoint, InputScalesAreReplacedInACopy) {
  for (const OutputFormat format : {OutputFormat::kModelOpt, OutputFormat::kCompressedTensors}) {
    const bool ct = format == OutputFormat::kCompressedTensors;
    const std::string from = dir_.file(ct ? "ct" : "mo"), to = from + "-scaled";
    QuantizeOptions options;
    options.format = format;
    ASSERT_OK(quantize_checkpoint(in(), from, options));
    const auto before = read_files(from);
    ASSERT_OK(write_input_scales(from, to, {{1, {0.5f, 0.0625f}}}, 64 << 10));
    EXPECT_EQ(read_files(from), before) << "the source is never written to";
    const auto a = must(Checkpoint::open(from)), b = must(Checkpoint::open(to));
    ASSERT_EQ(a->index().tensors().size(), b->index().tensors().size());
    int64_t changed = 0;
    for (const auto& [name, ref] : a->index().tensors()) {
      if (bytes_of(a->index(), name) != bytes_of(b->index(), name)) {
        ++changed;
        EXPECT_TRUE(name.starts_with("layers.1.") && name.find("input_") != std::string::npos)
            << name;
      }
    }
    EXPECT_EQ(changed, 4 * 3);
    const auto scales = must(b->layer_scales(1));
    EXPECT_EQ(scales->hidden, 0.5f);
    EXPECT_EQ(scales->intermediate, 0.0625f);
    EXPECT_EQ(write_input_scales(from, to, {{1, {0.5f, 0.5f}}}).code(), Code::kInvalidArgument);
    EXPECT_EQ(write_input_scales(from, from, {{1, {0.5f, 0.5f}}}).code(), Code::kInvalidArgument);
    EXPECT_EQ(write_input_scales(from, dir_.file("x"), {{9, {0.5f, 0.5f}}}).code(),
              Code::kInvalidArgument);
  }
  EXPECT_EQ(write_input_scales(in(), dir_.file("x"), {}).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
