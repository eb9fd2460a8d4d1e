// Families that stack experts under their own names load to the same experts as separate tensors.
#include <nlohmann/json.hpp>

#include "checkpoint/experts.h"
#include "checkpoint/float_experts.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test::family_stacks_test {
namespace {

using nlohmann::json;
using Layers = std::vector<int64_t>;

constexpr int64_t kExperts = 4, kHidden = 64, kIntermediate = 32;

// A stack is written from a checkpoint with one tensor an expert; both must load as the same bytes.
struct Layout {
  const char* name;
  json config;
  std::string stem;               // of layer 0
  std::string gate_up, up, down;  // names under the stem; `up` is empty if both are one tensor
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
       {{"model_type", "aria_text"},
        {"intermediate_size", kIntermediate},
        {"num_shared_experts", 0}},
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
      {"zaya",
       {{"model_type", "zaya"}},
       "model.layers.0.mlp.experts",
       "gate_up_proj",
       "",
       "down_proj"},
  };
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
  builder.config().update(layout.config);
  const GateUpOrder order = layout.alternate ? GateUpOrder::kInterleaved : GateUpOrder::kGateFirst;
  for (int64_t layer = 0; layer < 2; ++layer) {
    const auto take = [&](int64_t expert, const char* projection) {
      return builder.tensors()
          .extract(builder.tensor_name(layer, expert, projection, "codes"))
          .mapped()
          .bytes;
    };
    const auto append = [](RawTensor& stack, const std::vector<uint8_t>& bytes) {
      stack.bytes.insert(stack.bytes.end(), bytes.begin(), bytes.end());
    };
    RawTensor gate_up{DType::kBf16, {kExperts, kIntermediate, kHidden}, {}}, up = gate_up;
    RawTensor down{DType::kBf16, {kExperts, kHidden, kIntermediate}, {}};
    if (layout.up.empty()) gate_up.shape[1] *= 2;
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::vector<uint8_t> gate = take(e, "gate"), above = take(e, "up");
      append(gate_up, layout.up.empty() ? joined(gate, above, kHidden * 2, order) : gate);
      append(up, above);
      append(down, take(e, "down"));
    }
    if (layout.k_first) turn_stack(gate_up), turn_stack(down);
    std::string stem = layout.stem;
    stem[stem.find(".0.") + 1] = static_cast<char>('0' + layer);
    builder.tensors()[stem + "." + layout.gate_up] = gate_up;
    if (!layout.up.empty()) builder.tensors()[stem + "." + layout.up] = up;
    builder.tensors()[stem + "." + layout.down] = down;
  }
  return builder;
}

TEST(FamilyStacks, StacksUnderOtherNamesAreTheSameExperts) {
  const Opened expected(plain_builder());
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Opened checkpoint(stacked_builder(layout));
    EXPECT_EQ(checkpoint->model().layers, (Layers{0, 1}));
    EXPECT_EQ(checkpoint->tensor_name(0, 1, "up"),
              layout.stem + "." + (layout.up.empty() ? layout.gate_up : layout.up));
    for (int64_t e = 0; e < kExperts; ++e) {
      auto ours = must(float_expert(*checkpoint, 1, e)),
           theirs = must(float_expert(*expected, 1, e));
      for (const auto& [our, their] : {std::pair{&ours->gate, &theirs->gate},
                                       {&ours->up, &theirs->up},
                                       {&ours->down, &theirs->down}}) {
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

ATTACK_TEST(kPlantedFaults, FamilyStacks, WrongStacksAreFoundByName) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const std::string gate_up = layout.stem + "." + layout.gate_up,
                      down = layout.stem + "." + layout.down;
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
    builder.tensors()[layout.stem + (layout.stem.ends_with("experts") ? ".0" : ".experts.0") +
                      ".gate_proj.weight"] = {DType::kBf16, {1}, {0, 0}};
    EXPECT_THAT(refusal_of_open(builder).message(), HasSubstr("experts under several names"));
    attacked();
  }
}

// Step's three stacks as NVFP4: codes and scales of all experts in one tensor each, one tensor
// scale an expert.
TEST(FamilyStacks, ThreeStacksOfNvfp4) {
  CheckpointBuilder plain({.model_type = "qwen3_moe",
                           .num_experts = kExperts,
                           .hidden_size = kHidden,
                           .intermediate_size = kIntermediate});
  CheckpointBuilder stacked = plain;
  stacked.config()["model_type"] = "step3p5";
  stacked.config()["moe_layers_enum"] = "0,1";
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (const char* projection : {"gate", "up", "down"}) {
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
        RawTensor stack;
        std::string name;
        for (int64_t e = 0; e < kExperts; ++e) {
          auto node = stacked.tensors().extract(stacked.tensor_name(layer, e, projection, part));
          name = node.key();
          stack.dtype = node.mapped().dtype;
          stack.shape = node.mapped().shape;
          stack.bytes.insert(stack.bytes.end(), node.mapped().bytes.begin(),
                             node.mapped().bytes.end());
        }
        stack.shape.insert(stack.shape.begin(), kExperts);
        stacked.tensors()["model.layers." + std::to_string(layer) + ".moe." + projection + "_proj" +
                          name.substr(name.rfind('.'))] = stack;
      }
    }
  }
  const Opened expected(plain), checkpoint(stacked);
  EXPECT_EQ(checkpoint->model().format, SourceFormat::kModelOptStacked);
  EXPECT_EQ(checkpoint->tensor_name(1, 2, "up"), "model.layers.1.moe.up_proj.weight");
  for (int64_t e = 0; e < kExperts; ++e)
    expect_same(checkpoint->expert(1, e), expected->expert(1, e));
  EXPECT_TRUE(checkpoint->validate(1, {0, kExperts})->empty());
}

TEST(FamilyStacks, LimitsOfALayerAreItsOwn) {
  CheckpointBuilder builder = stacked_builder(layouts()[1]);
  builder.config()["swiglu_limits"] = {0, 7.0};
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->layer_options(0)->activation, Activation::kSwiglu);
  EXPECT_EQ(checkpoint->layer_options(1)->activation, Activation::kSwigluStep);
  EXPECT_EQ(checkpoint->layer_options(1)->swiglu_limit, 7.0f);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::family_stacks_test
