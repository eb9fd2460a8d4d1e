// open: choosing, streaming, refusing, cancelling. run: its results and its refusals.
//
// Long because open and run are tested over one set of tiny layers.
#include "moe/layer.h"

#include <nlohmann/json.hpp>

#include "checkpoint/expert_memory.h"
#include "moe/linear.h"
#include "moe/tiny.h"
#include "support/backends.h"
#include "support/sizes.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

TEST(Layer, StreamsOneExpertAtATime) {
  const TinyLayer tiny;
  std::vector<std::string> events;
  LayerSource source = tiny.source();
  source.expert = [&](int64_t e) -> Result<LoadedExpert> {
    events.push_back("load " + std::to_string(e));
    LoadedExpert loaded;
    loaded.source = tiny.experts[static_cast<size_t>(e)].source();
    loaded.memory =
        std::shared_ptr<ExpertMemory>(new ExpertMemory, [&events, e](ExpertMemory* memory) {
          events.push_back("drop " + std::to_string(e));
          delete memory;
        });
    return loaded;
  };
  source.name = "layer 12";
  LayerOptions options = tiny_layer_options();
  options.range = {1, 2};
  std::vector<std::string> items;
  int64_t bytes = 0;
  const auto progress = [&](const Progress& told) {
    EXPECT_EQ(told.what, "pack");
    EXPECT_EQ(told.total, 2);
    EXPECT_LE(told.done_bytes, told.total_bytes);
    EXPECT_GT(told.done_bytes, bytes);
    bytes = told.done_bytes;
    items.emplace_back(told.item);
    if (told.done == told.total) {
      EXPECT_EQ(told.done_bytes, told.total_bytes);
    }
    return true;
  };
  ASSERT_OK(MoeLayer::open(tiny.config(), source, options, progress));
  EXPECT_THAT(events, testing::ElementsAre("load 1", "drop 1", "load 2", "drop 2"));
  EXPECT_THAT(items, testing::ElementsAre("layer 12 expert 1", "layer 12 expert 2"));
  EXPECT_EQ(bytes, 2 * 3 * 64 * 48 / 16 * 9);
}

TEST(Layer, ProgressCancels) {
  const TinyLayer tiny;
  int calls = 0;
  const auto layer = MoeLayer::open(tiny.config(), tiny.source(), tiny_layer_options(),
                                    [&](const Progress&) { return ++calls < 2; });
  EXPECT_EQ(layer.status().code(), Code::kCancelled);
  EXPECT_EQ(calls, 2);
}

TEST(Layer, SourceFailuresPass) {
  const TinyLayer tiny;
  LayerSource source = tiny.source();
  source.expert = [](int64_t) -> Result<LoadedExpert> {
    return io_error("disk: expected bytes, got none");
  };
  const auto layer = MoeLayer::open(tiny.config(), source, tiny_layer_options());
  EXPECT_EQ(layer.status().code(), Code::kIo);
}

TEST(Layer, RefusesBadExperts) {
  struct Case {
    const char* text;
    std::function<void(Expert&)> break_it;
  };
  const Case cases[] = {
      {"expert 2: gate: expected (48, 64), got (47, 64)", [](Expert& e) { e.gate.rows = 47; }},
      {"expert 2: up: expected (48, 64), got (48, 32)", [](Expert& e) { e.up.cols = 32; }},
      {"expert 2: down: expected (64, 48), got (48, 64)",
       [](Expert& e) { std::swap(e.down.rows, e.down.cols); }},
      {"expert 2: gate tensor scale: expected a finite number >= 0, got inf",
       [](Expert& e) { e.gate.tensor_scale = std::numeric_limits<float>::infinity(); }},
      {"expert 2: up tensor scale: expected a finite number >= 0, got -1",
       [](Expert& e) { e.up.tensor_scale = -1; }},
      {"expert 2: down block scale: expected E4M3 with sign 0 and not NaN, got byte 127 at row 5 "
       "block 1",
       [](Expert& e) { e.down.block_scales[5 * 3 + 1] = 0x7F; }},
      {"expert 2: up block scale: expected E4M3 with sign 0 and not NaN, got byte 144 at row 47 "
       "block 3",
       [](Expert& e) { e.up.block_scales.back() = 0x90; }},
  };
  for (const Case& c : cases) {
    TinyLayer tiny;
    c.break_it(tiny.experts[2]);
    const auto layer = MoeLayer::open(tiny.config(), tiny.source(), tiny_layer_options());
    EXPECT_FALSE(layer.ok());
    EXPECT_THAT(layer.status().message(), HasSubstr(c.text));
  }
  const TinyLayer tiny;
  LayerSource source = tiny.source();
  source.expert = [inner = source.expert](int64_t e) -> Result<LoadedExpert> {
    auto loaded = inner(e);
    loaded->source.up.codes = nullptr;
    return loaded;
  };
  EXPECT_THAT(MoeLayer::open(tiny.config(), source, tiny_layer_options()).status().message(),
              HasSubstr("expert 0: up codes: expected a pointer, got null"));
}

TEST(Layer, NeedsASharedExpertIfItsConfigHasOne) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const TinyLayer tiny(options);
  LayerSource source = tiny.source();
  source.shared_expert = nullptr;
  EXPECT_EQ(MoeLayer::open(tiny.config(), source, tiny_layer_options()).status().code(),
            Code::kInvalidArgument);
}

TEST(Layer, OfAHostRefusesArraysOnADevice) {
  const TinyLayer tiny;
  LayerSource source = tiny.source();
  source.expert = [inner = source.expert](int64_t e) -> Result<LoadedExpert> {
    auto loaded = inner(e);
    loaded->source.on_device = true;
    return loaded;
  };
  const auto refused = MoeLayer::open(tiny.config(), source, tiny_layer_options());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(),
              HasSubstr("expert 0: codes, block scales: expected host memory"));
  EXPECT_EQ(open_tiny(tiny)->replace_expert(0, source.expert(1)->source).code(),
            Code::kInvalidArgument);
}

TEST(Layer, SaysWhatMemoryWasFor) {
  const auto config = MoeConfig::make(  // more than an address space holds
      test::sizes_of(1 << 15, 1, 1 << 20, 1 << 20));
  ASSERT_OK(config);
  LayerSource source;
  source.name = "layer 12";
  source.expert = [](int64_t) -> Result<LoadedExpert> { return LoadedExpert(); };
  const Status status = MoeLayer::open(*config, source, tiny_layer_options(1)).status();
  EXPECT_EQ(status.code(), Code::kOutOfMemory);
  EXPECT_THAT(status.message(), testing::StartsWith("packed weights of layer 12: expected "));
}

TEST(Layer, RefusesBadOptions) {
  const TinyLayer tiny;
  const int64_t most = std::numeric_limits<int64_t>::max();
  const struct {
    const char* text;
    ExpertRange range;
    int64_t max_tokens = 16;
    const char* backend = "auto";
  } cases[] = {
      {"expert range: expected a part of [0, 4), got first 3 count 2", {3, 2}},
      {"expert range", {-1, 2}},
      {"expert range", {2, 0}},
      {"expert range", {1, most}},
      {"max_tokens: expected 1 to 1073741823 (top_k 2), got 0", {}, 0},
      {"max_tokens", {}, int64_t{1} << 31},
      {"backend: expected one of auto, ", {}, 16, "fast"},
  };
  for (const auto& c : cases) {
    LayerOptions options = tiny_layer_options(c.max_tokens);
    options.range = c.range;
    options.backend = c.backend;
    const Status status = MoeLayer::open(tiny.config(), tiny.source(), options).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_THAT(status.message(), HasSubstr(c.text));
    EXPECT_FALSE(plan_layer(tiny.config(), {}, options).ok()) << c.text;
  }
}

TEST(Layer, RefusesSizesThatOverflow) {
  MoeOptions options = tiny_options();
  options.hidden_size = int64_t{1} << 40;
  options.intermediate_size = int64_t{1} << 40;
  const auto config = MoeConfig::make(options);
  if (!config.ok()) return;  // refused one step earlier
  EXPECT_EQ(plan_layer(*config, {}, tiny_layer_options()).status().code(), Code::kInvalidArgument);
}

TEST(Layer, RefusesBadBatches) {
  const TinyLayer tiny;
  const auto opened = open_tiny(tiny, tiny_layer_options(8));
  const MoeLayer& layer = *opened;
  const Buffer workspace = workspace_of(layer);
  TinyBatch good(tiny.options, 8);
  static float factors[8];
  const struct {
    const char* text;
    std::function<void(Batch&)> break_it;
  } cases[] = {
      {"tokens: expected 0 to 8, got 9", [](Batch& b) { b.tokens = 9; }},
      {"tokens: expected 0 to 8, got -1", [](Batch& b) { b.tokens = -1; }},
      {"hidden dtype: expected BF16, F16 or F32, got I32",
       [](Batch& b) { b.hidden_dtype = DType::kI32; }},
      {"out dtype: expected BF16, F16 or F32, got F64",
       [](Batch& b) { b.out_dtype = DType::kF64; }},
      {"topk_ids dtype: expected I32 or I64, got U8", [](Batch& b) { b.ids_dtype = DType::kU8; }},
      {"hidden: expected a pointer, got null", [](Batch& b) { b.hidden = nullptr; }},
      {"topk_ids: expected a pointer, got null", [](Batch& b) { b.topk_ids = nullptr; }},
      {"topk_weights: expected a pointer, got null", [](Batch& b) { b.topk_weights = nullptr; }},
      {"out: expected a pointer, got null", [](Batch& b) { b.out = nullptr; }},
      {"shared_weights: expected null", [](Batch& b) { b.shared_weights = factors; }},
      {"hidden: expected an address that is a multiple of 2",
       [](Batch& b) { b.hidden = static_cast<const char*>(b.hidden) + 1; }},
      {"topk_weights: expected an address that is a multiple of 4",
       [](Batch& b) {
         b.topk_weights = reinterpret_cast<const float*>(uintptr_t(b.topk_weights) + 2);
       }},
      {"out: expected memory of its own, got memory that overlaps hidden",
       [](Batch& b) { b.out = const_cast<void*>(b.hidden), b.out_dtype = DType::kBf16; }},
      {"workspace: expected memory of its own, got memory that overlaps out",
       [&](Batch& b) { b.out = workspace.data(); }},
      {"workspace: expected memory of its own, got memory that overlaps hidden",
       [&](Batch& b) { b.hidden = workspace.data(); }},
  };
  for (const auto& c : cases) {
    Batch batch = good.batch();
    c.break_it(batch);
    const Status status = run_in(workspace, layer, batch);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << c.text;
    EXPECT_THAT(status.message(), HasSubstr(c.text));
    for (const float value : good.out) ASSERT_EQ(value, -77.0f) << c.text;  // nothing written
  }
  EXPECT_EQ(layer.run(good.batch(), nullptr, workspace.size_bytes()).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(layer.run(good.batch(), workspace.data() + 16, workspace.size_bytes()).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(layer.run(good.batch(), workspace.data(), layer.workspace_bytes() - 1).code(),
            Code::kInvalidArgument);
  EXPECT_OK(layer.run(good.batch(), workspace.data(), layer.workspace_bytes()));
}

TEST(Layer, ZeroTokensAreLegalAndWriteNothing) {
  const TinyLayer tiny;
  const auto layer = open_tiny(tiny);
  const Buffer workspace = workspace_of(*layer);
  EXPECT_OK(run_in(workspace, *layer, Batch{}));
  const auto status = layer->status(workspace.data(), workspace.size_bytes());
  ASSERT_OK(status);
  EXPECT_EQ(status->hidden_blocks, 0u);
}

TEST(Layer, DescriptionHasTheWarningsOfItsBackend) {
  TinyLayer tiny;
  Backend backend = kReferenceBackend;
  backend.name = "warned";
  backend.caveat = "never run on a chip";
  backend.fp8_caveat = "sums have 13 bits";
  const auto notes = [&](ActivationFormat format) {
    tiny.options.activation_format = format;
    return nlohmann::json::parse(
               open_tiny(tiny, tiny_layer_options(), &backend)->describe_json())["notes"]
        .dump();
  };
  EXPECT_EQ(notes(ActivationFormat::kNvfp4), R"(["never run on a chip"])");
  EXPECT_EQ(notes(ActivationFormat::kFp8), R"(["never run on a chip","sums have 13 bits"])");
}

TEST(Layer, DescribesItsChoices) {
  TinyLayer tiny;
  tiny.options.activation_scale = ActivationScale::kStatic;
  tiny.scales = {0.3f, 0.2f};
  LayerOptions options = tiny_layer_options();
  options.backend = "reference";
  options.range = {1, 2};
  std::unique_ptr<MoeLayer> layer;
  const auto described = [&](ActivationFormat format) {
    tiny.options.activation_format = format;
    layer = open_tiny(tiny, options);
    return nlohmann::json::parse(layer->describe_json());
  };
  const auto json = described(ActivationFormat::kNvfp4);
  EXPECT_EQ(json["backend"], "reference");
  EXPECT_EQ(json["activation_format"], "nvfp4");
  EXPECT_EQ(json["activation_scale"],
            (nlohmann::json{{"hidden", 0.5}, {"intermediate", "dynamic_token"}}));
  EXPECT_EQ(json["expert_range"]["first"], 1);
  EXPECT_EQ(json["workspace_bytes"], layer->workspace_bytes());
  for (const char* step : {"route", "quantize", "gemm1_swiglu", "requantize", "gemm2", "combine"})
    EXPECT_TRUE(json["kernels"].contains(step)) << step;
  EXPECT_THAT(described(ActivationFormat::kBf16).dump(),
              AllOf(HasSubstr("rounded to bf16 once"), HasSubstr(R"("hidden":null)")));

  tiny.options.activation_scale = ActivationScale::kDynamicToken;
  const auto blocks = described(ActivationFormat::kInt8Block);
  EXPECT_EQ(blocks["activation_format"], "int8_block");
  EXPECT_EQ(blocks["activation_scale"],
            (nlohmann::json{{"hidden", "dynamic_block"}, {"intermediate", "dynamic_block"}}));
  EXPECT_TRUE(blocks["fp8_weights"].is_null());

  const auto fp8 = described(ActivationFormat::kFp8);
  EXPECT_EQ(fp8["activation_format"], "fp8");
  EXPECT_EQ(fp8["activation_scale"]["hidden"], "dynamic_token");
  const int64_t inexact = fp8["fp8_weights"]["inexact"], weights = fp8["fp8_weights"]["weights"];
  EXPECT_EQ(weights, 3 * 2 * 64 * 48);
  EXPECT_GT(
      inexact,
      weights / 10);  // codes of significand 1.5 under five of the eight significands of a scale
  EXPECT_LT(inexact, weights / 2);
  EXPECT_LE(fp8["fp8_weights"]["least_shift"], fp8["fp8_weights"]["most_shift"]);
}

TEST(Layer, PlanNeedsNoWeightsAndTellsTheSame) {
  const TinyLayer tiny;
  const auto needs = plan_layer(tiny.config(), {}, tiny_layer_options());
  const auto layer = open_tiny(tiny);
  ASSERT_OK(needs);
  EXPECT_EQ(needs->plan, layer->plan());
  EXPECT_EQ(needs->packed_bytes, layer->weights().bytes.size_bytes());
}

TEST(Registry, PrioritiesDescendAndNamesAreUnique) {
  for (size_t i = 1; i < backends().size(); ++i) {
    EXPECT_GT(backends()[i - 1]->priority, backends()[i]->priority);
    EXPECT_EQ(find_backend(backends()[i]->name), backends()[i]);
  }
  EXPECT_EQ(find_backend("none"), nullptr);
}

TEST(Registry, ExplainsEveryBackend) {
  const MoeConfig config = TinyLayer().config();
  const auto choices = explain(config, host_facts());
  ASSERT_EQ(choices.size(), backends().size());
  int chosen = 0;
  for (const BackendReport& choice : choices) {
    chosen += choice.chosen;
    EXPECT_FALSE(choice.reason.empty());
    EXPECT_EQ(choice.supported, find_backend(choice.backend)->supports(config, host_facts()).ok());
    EXPECT_TRUE(choice.supported || !choice.chosen);
  }
  EXPECT_EQ(chosen, 1);
  for (const BackendReport& choice : explain(config, host_facts(), "reference"))
    EXPECT_EQ(choice.chosen, choice.backend == "reference");
  const auto unknown = explain(config, host_facts(), "fast");
  EXPECT_EQ(unknown.back().backend, "fast");
  for (const BackendReport& choice : unknown) EXPECT_FALSE(choice.chosen);

  DeviceFacts gpu = host_facts();
  gpu.kind = DeviceKind::kCuda;
  for (const BackendReport& choice : explain(config, gpu))
    EXPECT_FALSE(choice.chosen || choice.supported);  // no host backend takes a GPU
  EXPECT_EQ(choose_backend(config, gpu, "auto").status().code(), Code::kUnsupported);
  EXPECT_EQ(choose_backend(config, gpu, "reference").status().code(), Code::kUnsupported);
}

// "auto" gives the layer to the CPU's best instruction set of this host. The long tier's old CPUs
// request theirs by name.
TEST(Registry, AutoRunsAnInstructionSetOfThisHost) {
  const auto backend = choose_backend(TinyLayer().config(), host_facts(), "auto");
  ASSERT_OK(backend);
  ASSERT_EQ(*backend, &kCpuBackend);
  const std::string choice = kCpuBackend.selection();
  ASSERT_EQ(choice.rfind("runs cpu:", 0), 0u) << choice;
  const Backend* chosen = find_backend(choice.substr(5));
  ASSERT_NE(chosen, nullptr) << choice;
  EXPECT_EQ(why_not_here(*chosen), "");
  RecordProperty("auto", chosen->name);
}

// Forced backends that would end in an illegal instruction: every way to open one reports what is
// missing.
class Forced : public testing::TestWithParam<std::string> {
 protected:
  static void expect_refused(const Status& status, const std::string& reason) {
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(reason));
  }
};

TEST_P(Forced, IsRefusedWhereTheHostLacksIt) {
  const Backend& backend = *find_backend("cpu:" + GetParam());
  const std::string reason = why_not_here(backend);
  if (reason.empty()) GTEST_SKIP() << backend.name << ": this host runs it";
  EXPECT_THAT(reason, HasSubstr("this one lacks it"));
  const TinyLayer tiny;
  LayerOptions options = tiny_layer_options();
  expect_refused(MoeLayer::open_on(backend, tiny.config(), tiny.source(), options).status(),
                 reason);
  options.backend = backend.name;
  expect_refused(MoeLayer::open(tiny.config(), tiny.source(), options).status(), reason);
  expect_refused(plan_layer(tiny.config(), {}, options).status(), reason);
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(16, 32, 0.25f, random);
  LinearOptions for_linear{.backend = backend.name, .max_tokens = 1};
  expect_refused(NvfpLinear::open(weight.view(), for_linear).status(), reason);
}

std::vector<std::string> instruction_set_names() {
  std::vector<std::string> names;
  for (const Backend& backend : cpu_instruction_sets())
    names.emplace_back(std::string(backend.name).substr(4));
  return names;
}
INSTANTIATE_TEST_SUITE_P(Names, Forced, testing::ValuesIn(instruction_set_names()),
                         [](const testing::TestParamInfo<std::string>& forced) {
                           return forced.param;
                         });

// Even on a host that runs everything, a backend that declines is not opened, however it is passed.
TEST(Layer, IsNotOpenedOnABackendThatDeclines) {
  Backend declining = kCpuBackend;
  declining.name = "cpu:other";
  declining.supports = [](const MoeConfig&, const DeviceFacts&) {
    return unsupported("expected another CPU");
  };
  const TinyLayer tiny;
  const Status status =
      MoeLayer::open_on(declining, tiny.config(), tiny.source(), tiny_layer_options()).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(), "backend cpu:other: expected another CPU");
}

}  // namespace
}  // namespace nvfp4_moe::internal
