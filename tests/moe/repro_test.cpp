// Repro files: a written file runs again, and errors in a file are reported.
#include "moe/repro.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "moe/config_json.h"
#include "moe/tiny.h"
#include "safetensors/safetensors.h"
#include "support/attack.h"
#include "support/backends.h"
#include "support/read_tensor.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

MoeOptions full_options() {
  MoeOptions options = tiny_options();
  options.activation = Activation::kSwigluClamped;
  options.swiglu_limit = 7.3f;
  options.shared_intermediate_size = 32;
  options.activation_scale = ActivationScale::kStatic;
  options.intermediate_scale = IntermediateScale::kFixed;
  options.router_weight = RouterWeight::kBeforeDown;
  return options;
}

// A repro of a run with every optional part, on the reference.
struct Written {
  TempDir directory;
  TinyLayer tiny{full_options()};
  TinyBatch batch{tiny.options, 5};
  std::vector<float> factors = {0.5f, 1.0f, 0.25f, 2.0f, 0.0f};
  std::string path = directory.file("repro.safetensors");
  std::unique_ptr<MoeLayer> layer;

  explicit Written(bool with_output = true) {
    tiny.scales = {0.0123f, 0.3f};
    LayerOptions options = tiny_layer_options();
    options.range = {1, 3};
    layer = open_tiny(tiny, options, &kReferenceBackend);
    EXPECT_OK(run_in(workspace_of(*layer), *layer, call()));
    EXPECT_OK(write_repro(path, *layer, call(), with_output));
  }
  Batch call() {
    Batch result = batch.batch();
    result.shared_weights = factors.data();
    return result;
  }
};

TEST(ConfigJson, GoesBothWays) {
  MoeOptions options = full_options();
  options.swiglu_limit = 0.1f;
  options.intermediate_fixed = 0x1p-20f;
  options.max_router_weight = 2.7f;
  options.batch_invariant = options.expert_biases = true;
  for (const RouterWeight weight :
       {RouterWeight::kAfterDown, RouterWeight::kBeforeDown, RouterWeight::kOnInput}) {
    options.router_weight = weight;
    const auto back = moe_options_from_json(to_json(options));
    ASSERT_OK(back);
    EXPECT_EQ(*back, options);
  }
  MoeOptions situ = tiny_options();
  situ.activation = Activation::kSitu;
  situ.situ_gate_limit = 4.0f;
  situ.situ_up_limit = 25.1f;
  EXPECT_EQ(*moe_options_from_json(to_json(situ)), situ);
  const std::string tiny = to_json(tiny_options());
  EXPECT_EQ(*moe_options_from_json(tiny), tiny_options());
  for (const char* added : {"expert_biases", "situ_gate_limit", "situ_up_limit"})
    EXPECT_EQ(tiny.find(added), std::string::npos)
        << "readers from before " << added << " take such a config";
}

ATTACK_TEST(kHostileNumbers, ConfigJson, RefusesWhatIsNotOne) {
  const auto changed = [](const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(to_json(tiny_options()));
    json[key] = value;
    return json.dump();
  };
  std::vector<std::string> texts = {"", "{", "[]", "null", "{}"};
  texts.push_back("{\"top_k\": 1, " + changed("top_k", 1).substr(1));  // a name twice
  for (const nlohmann::json& value : {nlohmann::json("4"), nlohmann::json(4.5),
                                      nlohmann::json(1e30), nlohmann::json(18446744073709551615u)})
    texts.push_back(changed("num_experts", value));
  for (const nlohmann::json& value :
       {nlohmann::json(nullptr), nlohmann::json(1e300), nlohmann::json(-3.5e38)})
    texts.push_back(changed("swiglu_alpha", value));
  for (const char* key : {"activation", "router_weight", "batch_invariant", "another"})
    texts.push_back(changed(key, 1));
  texts.push_back(changed("activation", "relu"));
  texts.push_back(changed("router_weight", "on_output"));
  for (const std::string& text : texts) {
    attacked();
    EXPECT_EQ(moe_options_from_json(text).status().code(), Code::kBadInput) << text;
  }
}

TEST(Repro, RunsAgainWithTheSameBits) {
  const mode_t old = umask(0);
  const Written written;
  umask(old);
  EXPECT_EQ(std::filesystem::status(written.path).permissions(), std::filesystem::perms(0600))
      << "the file holds weights and users' data";
  for (const Backend* backend : runnable_backends()) {
    const auto report = must(replay(written.path, backend->name, &serial_executor()));
    EXPECT_EQ(report->backend, backend->name);
    EXPECT_EQ(report->recorded_backend, "reference");
    EXPECT_EQ(report->tokens, 5);
    EXPECT_TRUE(report->passed()) << report->broken_output_limit << report->broken_reference_limit;
    ASSERT_TRUE(report->same_bits.has_value());
    if (backend == &kReferenceBackend) {
      EXPECT_TRUE(*report->same_bits);
    }
  }
  // Without an output it is compared only with the reference.
  const Written no_output(false);
  const auto report = must(replay(no_output.path, "auto", &serial_executor()));
  EXPECT_FALSE(report->same_bits.has_value());
  EXPECT_FALSE(report->with_output.has_value());
  EXPECT_TRUE(report->passed());
}

// Copies a repro, with one tensor's bytes or the metadata changed.
struct Edit {
  std::function<void(std::vector<TensorInfo>&, std::map<std::string, std::string>&)> header =
      [](auto&, auto&) {};
  std::string tensor;
  std::function<void(std::vector<std::byte>&)> bytes;
};
std::string edited(const Written& written, const Edit& edit) {
  const SafetensorsFile file = SafetensorsFile::open(written.path).value();
  std::vector<TensorInfo> infos = file.header().tensors;
  auto metadata = file.header().metadata;
  edit.header(infos, metadata);
  const std::string path = written.directory.file("edited.safetensors");
  auto writer = SafetensorsWriter::create(path, infos, metadata).value();
  for (const TensorInfo& info : infos) {
    const TensorInfo* original = file.find(info.name);
    uint64_t count = static_cast<uint64_t>(bits(info.dtype) / 8);
    for (const int64_t side : info.shape) count *= static_cast<uint64_t>(side);
    std::vector<std::byte> data;
    if (original != nullptr) data = read_tensor(file, *original);
    data.resize(count);
    if (info.name == edit.tensor) edit.bytes(data);
    EXPECT_OK(writer.write(data));
  }
  EXPECT_OK(writer.finish());
  return path;
}

TEST(Repro, AChangedOutputIsFound) {
  const Written written;
  Edit edit;
  edit.tensor = "output";
  edit.bytes = [](std::vector<std::byte>& bytes) {  // token 2, channel 7: another sign and size
    const float wrong = 1000.0f;
    std::memcpy(bytes.data() + (2 * 64 + 7) * 4, &wrong, 4);
  };
  const auto report = replay(edited(written, edit), "reference", &serial_executor());
  ASSERT_OK(report);
  EXPECT_FALSE(report->passed());
  EXPECT_FALSE(*report->same_bits);
  EXPECT_EQ(report->with_output->max_token, 2);
  EXPECT_EQ(report->with_output->max_channel, 7);
  EXPECT_EQ(report->broken_reference_limit, "");
  EXPECT_NE(report->broken_output_limit, "");
}

ATTACK_TEST(kHostileFiles, Repro, HostileFilesAreRefused) {
  using Infos = std::vector<TensorInfo>;
  using Metadata = std::map<std::string, std::string>;
  const Written written;
  const auto config_with = [&](const char* key, nlohmann::json value) {
    auto json = nlohmann::json::parse(to_json(full_options()));
    json[key] = std::move(value);
    return json.dump();
  };
  const auto without = [](const char* name) {
    return [name](Infos& infos, Metadata&) {
      std::erase_if(infos, [&](const TensorInfo& info) { return info.name == name; });
    };
  };
  const auto changed = [](const char* name, const std::function<void(TensorInfo&)>& change) {
    return [name, change](Infos& infos, Metadata&) {
      for (auto& info : infos)
        if (info.name == name) change(info);
    };
  };
  const auto reshaped = [&](const char* name, std::vector<int64_t> shape) {
    return changed(name, [shape](TensorInfo& info) { info.shape = shape; });
  };
  const auto retyped = [&](const char* name, DType dtype) {
    return changed(name, [dtype](TensorInfo& info) { info.dtype = dtype; });
  };
  const auto metadata = [](const char* key, std::string value) {
    return [key, value](Infos&, Metadata& data) { data[key] = value; };
  };
  const struct {
    const char* text;
    std::function<void(Infos&, Metadata&)> header;
  } cases[] = {
      {"metadata \"format\": expected nvfp4_moe_repro", metadata("format", "pt")},
      {"metadata \"version\": expected 1", metadata("version", "2")},
      {"metadata \"config\": expected a value, got none",
       [](Infos&, Metadata& data) { data.erase("config"); }},
      {"config", metadata("config", "[[[[")},
      {"config hidden_size", metadata("config", config_with("hidden_size", "64"))},
      {"tensor hidden: expected (5, 128)", metadata("config", config_with("hidden_size", 128))},
      {"metadata \"config\": top_k", metadata("config", config_with("top_k", int64_t{1} << 60))},
      {"tensor topk_ids: expected (5, 3)", metadata("config", config_with("top_k", 3))},
      {"range_first", metadata("range_first", "2")},
      {"range_first", metadata("range_first", "-1")},
      {"range_first", metadata("range_first", "9223372036854775808")},
      {"range_first", metadata("range_first", "1 ")},
      {"hidden_scale", metadata("hidden_scale", "nan")},
      {"hidden_scale", metadata("hidden_scale", "-1")},
      {"intermediate_scale", metadata("intermediate_scale", "1e300")},
      {"tensor tensor_scales: expected", without("tensor_scales")},
      {"tensor tensor_scales: expected", reshaped("tensor_scales", {1, 3})},
      {"tensor tensor_scales: expected", retyped("tensor_scales", DType::kI32)},
      {"range_first", reshaped("tensor_scales", {600, 3})},
      {"tensor hidden: expected", without("hidden")},
      {"tensor hidden: expected", reshaped("hidden", {5 * 64})},
      {"tensor hidden: expected at least one token", reshaped("hidden", {0, 64})},
      {"tensor hidden: expected BF16, F16 or F32", retyped("hidden", DType::kI16)},
      {"tensor topk_ids: expected one, got none", without("topk_ids")},
      {"tensor topk_ids: expected I32 or I64", retyped("topk_ids", DType::kF32)},
      {"tensor topk_ids: expected (5, 2)", reshaped("topk_ids", {2, 5})},
      {"tensor topk_weights: expected (5, 2) F32", retyped("topk_weights", DType::kI32)},
      {"tensor shared_weights: expected (5) F32", reshaped("shared_weights", {4})},
      {"tensor output: expected", reshaped("output", {4, 64})},
      {"tensor output: expected BF16, F16 or F32", retyped("output", DType::kU32)},
      {"tensor shared_weights: expected none",
       [&](Infos& infos, Metadata& data) {
         data["config"] = config_with("shared_intermediate_size", 0);
         reshaped("tensor_scales", {3, 3})(infos, data);
       }},
      {"tensor expert.2.down.codes: expected one, got none", without("expert.2.down.codes")},
      {"tensor expert.0.gate.codes: expected (48, 32) U8",
       reshaped("expert.0.gate.codes", {32, 48})},
      {"tensor expert.1.up.block_scales: expected (48, 4) F8_E4M3",
       retyped("expert.1.up.block_scales", DType::kU8)},
      {"tensor shared.up.codes: expected one, got none", without("shared.up.codes")},
  };
  for (const auto& c : cases) {
    Edit edit;
    edit.header = c.header;
    attacked();
    EXPECT_THAT(replay(edited(written, edit), "reference", &serial_executor()),
                Refused(Code::kBadInput, c.text));
  }
  for (const char* name : {"expert.1.up.block_scales", "tensor_scales"}) {
    Edit bad_scales;
    bad_scales.tensor = name;
    bad_scales.bytes = [](std::vector<std::byte>& bytes) { std::memset(bytes.data(), 0xFF, 4); };
    attacked();
    EXPECT_EQ(replay(edited(written, bad_scales), "reference").status().code(), Code::kBadInput);
  }
  EXPECT_FALSE(replay(written.directory.file("missing"), "reference").ok());
  std::filesystem::resize_file(written.path, 1000);
  attacked();
  EXPECT_EQ(replay(written.path, "reference").status().code(), Code::kBadInput);
}

TEST(Repro, RefusesToWriteBadBatches) {
  Written written;
  const std::string path = written.directory.file("no");
  Batch no_hidden = written.call(), no_tokens = written.call();
  no_hidden.hidden = nullptr;
  no_tokens.tokens = 0;
  for (const Batch& batch : {no_hidden, no_tokens})
    EXPECT_EQ(write_repro(path, *written.layer, batch, false).code(), Code::kInvalidArgument);
  EXPECT_FALSE(write_repro(path + "/such/directory", *written.layer, written.call(), false).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace nvfp4_moe::internal
