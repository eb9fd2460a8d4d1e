// Model types whose configs and names differ from the first families': which layers have experts and of which sizes, stacks
// under names of their own, and what is wrong with any of them by name.
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/float_experts.h"
#include "checkpoint/model_config.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::families_test {
namespace {

using nlohmann::json;
using test::attacked;
using test::CheckpointBuilder;
using test::RawTensor;
using test::TempDir;
using testing::HasSubstr;
using Layers = std::vector<int64_t>;

constexpr int64_t kExperts = 4, kHidden = 64, kIntermediate = 32;

Result<ModelInfo> parse(const json& config) { return parse_model_config(config.dump(), ""); }

// Six layers, four experts of 32 under the field that `size` names; what else a type needs is in `more`.
json config_of(const char* type, const char* size, const json& more) {
  json config = {{"model_type", type},   {"hidden_size", kHidden},  {"num_hidden_layers", 6},
                 {"hidden_act", "silu"}, {"num_experts", kExperts}, {"num_experts_per_tok", 2},
                 {size, kIntermediate}};
  config.update(more);
  return config;
}

struct Type {
  const char* name;
  const char* size;
  json more;
  Layers layers;
  int64_t shared_size;
  const char* needs;  // a field without which it is refused
};

const std::vector<Type>& types() {
  const Layers all = {0, 1, 2, 3, 4, 5}, after_first = {1, 2, 3, 4, 5};
  const json listed = {"dense", "sparse", "dense", "sparse", "dense", "dense"};
  const char *moe = "moe_intermediate_size", *plain = "intermediate_size";
  static const std::vector<Type> table = {
      {"afmoe", moe, {{"num_dense_layers", 1}, {"num_shared_experts", 2}}, after_first, 64, "num_dense_layers"},
      {"aria_text", plain, {{"moe_num_shared_experts", 2}}, all, 64, plain},
      {"axk1", moe, {{"first_k_dense_replace", 1}, {"n_shared_experts", 1}}, after_first, 32, "first_k_dense_replace"},
      {"axk2", moe, {{"mlp_layer_types", listed}, {"n_shared_experts", 1}}, {1, 3}, 32, "mlp_layer_types"},
      {"bailing_moe", moe, {{"first_k_dense_replace", 1}, {"num_shared_experts", 2}}, after_first, 64, moe},
      {"bailing_moe_v2",
       moe,
       {{"first_k_dense_replace", 0}, {"num_shared_experts", 1}, {"moe_shared_expert_intermediate_size", 96}},
       all,
       96,
       "num_shared_experts"},
      {"cohere2_moe", plain, {{"mlp_layer_types", listed}, {"num_shared_experts", 1}}, {1, 3}, 0, "mlp_layer_types"},
      {"deepseek_ocr2_text", moe, {{"first_k_dense_replace", 1}, {"n_shared_experts", 2}}, after_first, 64, moe},
      {"dots1", moe, {{"first_k_dense_replace", 1}, {"n_shared_experts", nullptr}}, after_first, 0, "hidden_act"},
      {"ernie4_5_moe",
       moe,
       {{"moe_layer_start_index", 1},
        {"moe_layer_end_index", 4},
        {"moe_layer_interval", 2},
        {"moe_num_shared_experts", 2}},
       {1, 3},
       64,
       "moe_layer_start_index"},
      {"exaone_moe", moe, {{"first_k_dense_replace", 1}, {"num_shared_experts", 1}}, after_first, 32, moe},
      {"flex_olmo", plain, json::object(), all, 0, plain},
      {"granitemoe", plain, json::object(), all, 0, "num_experts"},
      {"granitemoehybrid", plain, {{"shared_intermediate_size", 48}}, all, 48, "shared_intermediate_size"},
      {"hunyuan_v1_moe", plain, {{"moe_topk", {2, 2, 2, 2, 2, 2}}}, all, 32, plain},
      {"hunyuan_v1_moe", moe, {{"intermediate_size", 96}, {"num_shared_expert", {2, 2}}}, all, 64, "num_experts"},
      {"hy_v3", moe, {{"mlp_layer_types", listed}, {"num_shared_experts", 1}}, {1, 3}, 32, "num_shared_experts"},
      {"hy_v4", moe, {{"mlp_layer_types", listed}, {"swiglu_limit", 10.0}}, {1, 3}, 0, "swiglu_limit"},
      {"inkling_text", moe, {{"mlp_layer_types", listed}}, {1, 3}, 0, "mlp_layer_types"},
      {"jamba", plain, {{"expert_layer_period", 2}, {"expert_layer_offset", 1}}, {1, 3, 5}, 0, "expert_layer_offset"},
      {"laguna", moe, {{"mlp_layer_types", listed}, {"shared_expert_intermediate_size", 80}}, {1, 3}, 80, moe},
      {"lfm2_moe", moe, {{"num_dense_layers", 2}, {"hidden_act", nullptr}}, {2, 3, 4, 5}, 0, "num_dense_layers"},
      {"longcat_flash", "expert_ffn_hidden_size", {{"num_layers", 3}}, {0, 1, 2}, 0, "num_layers"},
      {"mellum", moe, json::object(), all, 0, moe},
      {"mimo_v2_flash", moe, {{"moe_layer_freq", {0, 1, 1, 0, 0, 1}}}, {1, 2, 5}, 0, "moe_layer_freq"},
      {"minimax", plain, json::object(), all, 0, plain},
      {"mistral4", moe, {{"first_k_dense_replace", 0}, {"n_shared_experts", 1}}, all, 32, "n_shared_experts"},
      {"olmoe", plain, json::object(), all, 0, plain},
      {"openai_privacy_filter", plain, json::object(), all, 0, plain},
      {"phimoe", plain, json::object(), all, 0, plain},
      {"qwen4_exp_text", moe, {{"shared_expert_intermediate_size", 80}}, all, 80, "shared_expert_intermediate_size"},
      {"solar_open", moe, {{"n_shared_experts", 1}}, all, 32, "n_shared_experts"},
      {"step3p5", moe, {{"moe_layers_enum", "3,4,5"}}, {3, 4, 5}, 0, "moe_layers_enum"},
      {"step3p5", moe, {{"moe_layers_enum", {3, 5}}}, {3, 5}, 0, "moe_layers_enum"},
      {"zaya", moe, {{"num_experts_per_tok", 1}}, all, 0, "num_experts_per_tok"},
  };
  return table;
}

TEST(Families, WhatTheirConfigsSay) {
  for (const Type& type : types()) {
    SCOPED_TRACE(type.name);
    Result<ModelInfo> model = parse(config_of(type.name, type.size, type.more));
    ASSERT_OK(model);
    EXPECT_EQ(model->model_type, type.name);
    EXPECT_EQ(model->layers, type.layers);
    EXPECT_EQ(model->options.num_experts, kExperts);
    EXPECT_EQ(model->options.intermediate_size, kIntermediate);
    EXPECT_EQ(model->options.shared_intermediate_size, type.shared_size);
    EXPECT_EQ(model->options.top_k, type.name == std::string("zaya") ? 1 : 2);
  }
}

TEST(Families, AFieldThatIsMissingIsNamed) {
  for (const Type& type : types()) {
    SCOPED_TRACE(type.name);
    json config = config_of(type.name, type.size, type.more);
    config.erase(type.needs);
    if (config.contains("moe_topk")) config.erase("num_experts_per_tok");
    const Status status = parse(config).status();
    EXPECT_EQ(status.code(), Code::kBadInput) << status.message();
    EXPECT_THAT(status.message(), HasSubstr("missing, and"));
  }
}

TEST(Families, OneNumberForAllLayersMayBeAList) {
  json config = config_of("hunyuan_v1_moe", "intermediate_size", json::object());
  config["num_experts"] = {4, 4, 4, 4, 4, 4};
  ASSERT_OK(parse(config));
  config["num_experts"] = {4, 4, 8, 4, 4, 4};
  EXPECT_EQ(parse(config).status().code(), Code::kUnsupported);
  EXPECT_THAT(parse(config).status().message(), HasSubstr("num_experts: expected one number for all layers"));
}

ATTACK_TEST(kHostileFiles, Families, HostileListsOfLayersAndLimits) {
  const json step = config_of("step3p5", "moe_intermediate_size", {{"moe_layers_enum", "3"}});
  for (const json& bad : {json("3,,4"), json("3;4"), json("a"), json("-1"), json("99999999"), json("]"), json("3],[4"),
                          json(3), json(true), json::object(), json({"3", 4}), json({2.5, 3})}) {
    json config = step;
    config["moe_layers_enum"] = bad;
    EXPECT_EQ(parse(config).status().code(), Code::kBadInput) << bad;
    EXPECT_THAT(parse(config).status().message(), HasSubstr("moe_layers_enum")) << bad;
    attacked();
  }
  const json limits = {nullptr, 0, 0.0, 7, 16.5, 0};
  for (const json& bad : {json(7.0), json({7.0, 7.0}), json::array(), json({0, 0, 0, -1, 0, 0}),
                          json({0, 0, 0, "7", 0, 0}), json({0, 0, 0, 1e300, 0, 0}), json({0, 0, 0, {7}, 0, 0})}) {
    json config = step;
    config["swiglu_limits"] = bad;
    EXPECT_EQ(parse(config).status().code(), Code::kBadInput) << bad;
    EXPECT_THAT(parse(config).status().message(), HasSubstr("swiglu_limits")) << bad;
    attacked();
  }
  json config = step;
  config["swiglu_limits"] = limits;
  const std::map<int64_t, float> expected = {{3, 7.0f}, {4, 16.5f}};
  EXPECT_EQ(parse(config)->swiglu_limits, expected);
  config = config_of("jamba", "intermediate_size", {{"expert_layer_period", 2}, {"expert_layer_offset", 2}});
  EXPECT_THAT(parse(config).status().message(), HasSubstr("expert_layer_offset: expected an integer in [0, 1], got 2"));
}

TEST(Families, ADeclinedTypeSaysWhy) {
  const std::pair<const char*, const char*> declined[] = {
      {"dbrx", "rows of one matrix"},     {"doge", "rows of an embedding"}, {"gemma4", "GELU"},
      {"ernie4_5_vl_moe", "two sets"},    {"jetmoe", "adds a bias"},        {"nllb-moe", "relu and no gate"},
      {"switch_transformers", "no gate"}, {"diffusion_gemma", "GELU"},
  };
  for (const auto& [type, words] : declined) {
    const Status status = parse(config_of(type, "intermediate_size", json::object())).status();
    EXPECT_EQ(status.code(), Code::kUnsupported) << type;
    EXPECT_THAT(status.message(), HasSubstr(words));
  }
  json laguna = config_of("laguna", "moe_intermediate_size",
                          {{"mlp_layer_types", {"sparse", "dense", "dense", "dense", "dense", "dense"}},
                           {"shared_expert_intermediate_size", 0},
                           {"moe_apply_router_weight_on_input", false}});
  EXPECT_OK(parse(laguna));
  laguna["moe_apply_router_weight_on_input"] = true;
  EXPECT_THAT(parse(laguna).status().message(), HasSubstr("moe_apply_router_weight_on_input"));
}

// ---- stacks under other names

// A stack is written from a checkpoint with one tensor an expert; both must load as the same bytes.
struct Layout {
  const char* name;
  json config;
  std::string stem;               // of layer 0
  std::string gate_up, up, down;  // names under the stem; `up` is empty where both are one tensor
  bool alternate = false, k_first = false;
};

std::vector<Layout> layouts() {
  return {
      {"granite",
       {{"model_type", "granitemoe"}, {"intermediate_size", kIntermediate}},
       "model.layers.0.block_sparse_moe",
       "input_linear.weight",
       "",
       "output_linear.weight"},
      {"step",
       {{"model_type", "step3p5"}, {"moe_layers_enum", "0,1"}},
       "model.layers.0.moe",
       "gate_proj.weight",
       "up_proj.weight",
       "down_proj.weight"},
      {"aria",
       {{"model_type", "aria_text"}, {"intermediate_size", kIntermediate}, {"num_shared_experts", 0}},
       "language_model.model.layers.0.mlp.experts",
       "fc1.weight",
       "",
       "fc2.weight",
       false,
       true},
      {"inkling",
       {{"model_type", "inkling_text"}, {"mlp_layer_types", {"sparse", "sparse"}}},
       "model.llm.layers.0.mlp.experts",
       "w13_weight",
       "",
       "w2_weight",
       true},
      {"zaya", {{"model_type", "zaya"}}, "model.layers.0.mlp.experts", "gate_up_proj", "", "down_proj"},
  };
}

// (rows, cols) of 2-byte elements to (cols, rows).
std::vector<uint8_t> turned(const std::vector<uint8_t>& in, int64_t rows, int64_t cols) {
  std::vector<uint8_t> out(in.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) std::memcpy(&out[(c * rows + r) * 2], &in[(r * cols + c) * 2], 2);
  return out;
}

std::vector<uint8_t> joined(std::vector<uint8_t> gate, const std::vector<uint8_t>& up, bool alternate) {
  if (!alternate) {
    gate.insert(gate.end(), up.begin(), up.end());
    return gate;
  }
  std::vector<uint8_t> out;
  const size_t row = static_cast<size_t>(kHidden) * 2;
  for (size_t at = 0; at < gate.size(); at += row) {
    out.insert(out.end(), gate.begin() + static_cast<int64_t>(at), gate.begin() + static_cast<int64_t>(at + row));
    out.insert(out.end(), up.begin() + static_cast<int64_t>(at), up.begin() + static_cast<int64_t>(at + row));
  }
  return out;
}

CheckpointBuilder plain_builder() {
  return CheckpointBuilder({.model_type = "qwen3_moe",
                            .format = SourceFormat::kFloat,
                            .num_experts = kExperts,
                            .hidden_size = kHidden,
                            .intermediate_size = kIntermediate});
}

// The plain checkpoint's experts, restacked.
CheckpointBuilder stacked_builder(const Layout& layout) {
  CheckpointBuilder builder = plain_builder();
  for (const auto& [key, value] : layout.config.items()) builder.config()[key] = value;
  for (int64_t layer = 0; layer < 2; ++layer) {
    RawTensor gate_up{DType::kBf16, {}, {}}, up = gate_up, down = gate_up;
    for (int64_t e = 0; e < kExperts; ++e) {
      std::vector<uint8_t> parts[3];
      for (int p = 0; p < 3; ++p) {
        const char* const names[] = {"gate", "up", "down"};
        parts[p] = builder.tensors().extract(builder.tensor_name(layer, e, names[p], "codes")).mapped().bytes;
      }
      if (!layout.up.empty()) {
        gate_up.bytes.insert(gate_up.bytes.end(), parts[0].begin(), parts[0].end());
        up.bytes.insert(up.bytes.end(), parts[1].begin(), parts[1].end());
      } else {
        std::vector<uint8_t> both = joined(parts[0], parts[1], layout.alternate);
        if (layout.k_first) both = turned(both, 2 * kIntermediate, kHidden);
        gate_up.bytes.insert(gate_up.bytes.end(), both.begin(), both.end());
      }
      if (layout.k_first) parts[2] = turned(parts[2], kHidden, kIntermediate);
      down.bytes.insert(down.bytes.end(), parts[2].begin(), parts[2].end());
    }
    const int64_t rows = layout.up.empty() ? 2 * kIntermediate : kIntermediate;
    gate_up.shape = layout.k_first ? Layers{kExperts, kHidden, rows} : Layers{kExperts, rows, kHidden};
    up.shape = {kExperts, kIntermediate, kHidden};
    down.shape = layout.k_first ? Layers{kExperts, kIntermediate, kHidden} : Layers{kExperts, kHidden, kIntermediate};
    std::string stem = layout.stem;
    stem[stem.find(".0.") + 1] = static_cast<char>('0' + layer);
    builder.tensors()[stem + "." + layout.gate_up] = gate_up;
    if (!layout.up.empty()) builder.tensors()[stem + "." + layout.up] = up;
    builder.tensors()[stem + "." + layout.down] = down;
  }
  return builder;
}

TEST(Families, StacksUnderOtherNamesAreTheSameExperts) {
  CheckpointBuilder plain = plain_builder();
  TempDir plain_dir;
  ASSERT_OK(plain.write(plain_dir.path().string()));
  const Result<Checkpoint> expected = Checkpoint::open(plain_dir.path().string());
  ASSERT_OK(expected);
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    CheckpointBuilder builder = stacked_builder(layout);
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    EXPECT_EQ(checkpoint->model().layers, (Layers{0, 1}));
    EXPECT_EQ(checkpoint->tensor_name(0, 1, "up"),
              layout.stem + "." + (layout.up.empty() ? layout.gate_up : layout.up));
    for (int64_t e = 0; e < kExperts; ++e) {
      Result<FloatExpert> ours = float_expert(*checkpoint, 1, e), theirs = float_expert(*expected, 1, e);
      ASSERT_OK(ours);
      ASSERT_OK(theirs);
      const std::pair<FloatWeights*, FloatWeights*> pairs[] = {
          {&ours->gate, &theirs->gate}, {&ours->up, &theirs->up}, {&ours->down, &theirs->down}};
      for (const auto& [our, their] : pairs) {
        ASSERT_OK(our->fetch());
        ASSERT_OK(their->fetch());
        std::vector<float> a(static_cast<size_t>(our->cols)), b = a;
        ASSERT_EQ(our->rows, their->rows);
        for (int64_t r = 0; r < our->rows; ++r) {
          our->read_row(r, a.data());
          their->read_row(r, b.data());
          ASSERT_EQ(a, b) << "expert " << e << " row " << r;
        }
      }
    }
  }
}

ATTACK_TEST(kPlantedFaults, Families, WrongStacksAreFoundByName) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const std::string gate_up = layout.stem + "." + layout.gate_up, down = layout.stem + "." + layout.down;
    const auto found = [&](auto change, const char* id) {
      CheckpointBuilder builder = stacked_builder(layout);
      change(builder.tensors());
      TempDir dir;
      ASSERT_OK(builder.write(dir.path().string()));
      const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
      attacked();
      if (!checkpoint.ok()) {
        EXPECT_EQ(checkpoint.status().code(), Code::kBadInput) << checkpoint.status().message();
        return;
      }
      bool seen = false;
      for (const Finding& finding : checkpoint->findings()) seen = seen || finding.id == id;
      EXPECT_TRUE(seen) << id;
      EXPECT_FALSE(checkpoint->check_layout(0, {0, kExperts}, false).ok());
    };
    found([&](auto& tensors) { tensors.erase(down); }, "missing_expert");
    found([&](auto& tensors) { tensors.erase(gate_up); }, "missing_expert");
    found(
        [&](auto& tensors) {
          tensors[down].shape[0] = kExperts - 1;
          tensors[down].bytes.resize(tensors[down].bytes.size() / kExperts * (kExperts - 1));
        },
        "shape_mismatch");
    found([&](auto& tensors) { std::swap(tensors[gate_up], tensors[down]); }, "shape_mismatch");
    // The same experts a second time, one by one.
    CheckpointBuilder builder = stacked_builder(layout);
    builder.tensors()[layout.stem + (layout.stem.ends_with("experts") ? ".0" : ".experts.0") + ".gate_proj.weight"] = {
        DType::kBf16, {1}, {0, 0}};
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    EXPECT_THAT(Checkpoint::open(dir.path().string()).status().message(), HasSubstr("experts under several names"));
    attacked();
  }
}

TEST(Families, LimitsOfALayerAreItsOwn) {
  CheckpointBuilder builder = stacked_builder(layouts()[1]);
  builder.config()["swiglu_limits"] = {0, 7.0};
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->layer_options(0)->activation, Activation::kSwiglu);
  EXPECT_EQ(checkpoint->layer_options(1)->activation, Activation::kSwigluStep);
  EXPECT_EQ(checkpoint->layer_options(1)->swiglu_limit, 7.0f);
}

}  // namespace
}  // namespace nvfp4_moe::families_test
