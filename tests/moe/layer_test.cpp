// open: choosing, streaming, refusing, cancelling. run: its refusals. The description, the plan and
// the registry.
#include "moe/layer.h"

#include <nlohmann/json.hpp>

#include "checkpoint/expert_memory.h"
#include "moe/linear.h"
#include "moe/registry.h"
#include "moe/tiny.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

Status opened(const TinyLayer& tiny, const LayerSource& source, const ProgressFn& progress = {}) {
  return MoeLayer::open(tiny.config(), source, tiny_layer_options(), progress).status();
}

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
  int64_t bytes = 0;
  const auto progress = [&](const Progress& told) {
    EXPECT_EQ(told.what, "pack");
    EXPECT_EQ(told.total, 2);
    EXPECT_EQ(told.done_bytes == told.total_bytes, told.done == told.total);
    EXPECT_GT(told.done_bytes, bytes);
    bytes = told.done_bytes;
    events.emplace_back(told.item);
    return true;
  };
  ASSERT_OK(MoeLayer::open(tiny.config(), source, options, progress));
  EXPECT_THAT(events, testing::UnorderedElementsAre("load 1", "drop 1", "layer 12 expert 1",
                                                    "load 2", "drop 2", "layer 12 expert 2"));
  std::erase_if(events, [](const std::string& event) { return event.starts_with("layer"); });
  EXPECT_THAT(events, ElementsAre("load 1", "drop 1", "load 2", "drop 2"));
  EXPECT_EQ(bytes, 2 * 3 * 64 * 48 / 16 * 9);
}

TEST(Layer, FailuresAndCancellationsEndTheOpening) {
  const TinyLayer tiny;
  int calls = 0;
  EXPECT_EQ(opened(tiny, tiny.source(), [&](const Progress&) { return ++calls < 2; }).code(),
            Code::kCancelled);
  EXPECT_EQ(calls, 2);
  LayerSource source = tiny.source();
  source.expert = [](int64_t) -> Result<LoadedExpert> { return io_error("disk: no bytes"); };
  EXPECT_EQ(opened(tiny, source).code(), Code::kIo);
}

TEST(Layer, RefusesBadExperts) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::string scale = "block scale: expected E4M3 with sign 0 and not NaN, got byte ";
  const struct {
    std::string text;
    std::function<void(Expert&)> break_it;
  } cases[] = {
      {"gate: expected (48, 64), got (47, 64)", [](Expert& e) { e.gate.rows = 47; }},
      {"up: expected (48, 64), got (48, 32)", [](Expert& e) { e.up.cols = 32; }},
      {"down: expected (64, 48), got (48, 64)",
       [](Expert& e) { std::swap(e.down.rows, e.down.cols); }},
      {"gate tensor scale: expected a finite number >= 0, got inf",
       [&](Expert& e) { e.gate.tensor_scale = inf; }},
      {"up tensor scale: expected a finite number >= 0, got -1",
       [](Expert& e) { e.up.tensor_scale = -1; }},
      {"down " + scale + "127 at row 5 block 1",
       [](Expert& e) { e.down.block_scales[5 * 3 + 1] = 0x7F; }},
      {"up " + scale + "144 at row 47 block 3", [](Expert& e) { e.up.block_scales.back() = 0x90; }},
  };
  for (const auto& c : cases) {
    TinyLayer tiny;
    c.break_it(tiny.experts[2]);
    EXPECT_THAT(opened(tiny, tiny.source()).message(), HasSubstr("expert 2: " + c.text));
  }
}

TEST(Layer, RefusesBadSources) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const TinyLayer tiny(options);
  const auto changed = [&](const std::function<void(ExpertSource&)>& change) {
    LayerSource source = tiny.source();
    source.expert = [inner = source.expert, change](int64_t e) -> Result<LoadedExpert> {
      auto loaded = inner(e);
      change(loaded->source);
      return loaded;
    };
    return source;
  };
  EXPECT_THAT(opened(tiny, changed([](ExpertSource& s) { s.up.codes = nullptr; })),
              Refused(Code::kInvalidArgument, "expert 0: up codes: expected a pointer, got null"));
  const LayerSource on_device = changed([](ExpertSource& s) { s.on_device = true; });
  EXPECT_THAT(opened(tiny, on_device),
              Refused(Code::kInvalidArgument, "expert 0: codes, block scales: expected host"));
  EXPECT_EQ(open_tiny(tiny)->replace_expert(0, on_device.expert(1)->source).code(),
            Code::kInvalidArgument);
  LayerSource no_shared = tiny.source();
  no_shared.shared_expert = nullptr;
  EXPECT_EQ(opened(tiny, no_shared).code(), Code::kInvalidArgument);
}

TEST(Layer, SaysWhatMemoryWasFor) {
  const MoeConfig config =  // more than an address space holds
      *must(MoeConfig::make(sizes_of(1 << 15, 1, 1 << 20, 1 << 20)));
  LayerSource source;
  source.name = "layer 12";
  source.expert = [](int64_t) -> Result<LoadedExpert> { return LoadedExpert(); };
  EXPECT_THAT(MoeLayer::open(config, source, tiny_layer_options(1)),
              Refused(Code::kOutOfMemory, "packed weights of layer 12: expected "));
}

TEST(Layer, RefusesBadOptions) {
  const TinyLayer tiny;
  const struct {
    const char* text;
    ExpertRange range;
    int64_t max_tokens = 16;
    const char* backend = "auto";
  } cases[] = {
      {"expert range: expected a part of [0, 4), got first 3 count 2", {3, 2}},
      {"expert range", {-1, 2}},
      {"expert range", {2, 0}},
      {"expert range", {1, std::numeric_limits<int64_t>::max()}},
      {"max_tokens: expected 1 to 1073741823 (top_k 2), got 0", {}, 0},
      {"max_tokens", {}, int64_t{1} << 31},
      {"backend: expected one of auto, ", {}, 16, "fast"},
  };
  for (const auto& c : cases) {
    LayerOptions options = tiny_layer_options(c.max_tokens);
    options.range = c.range;
    options.backend = c.backend;
    EXPECT_THAT(MoeLayer::open(tiny.config(), tiny.source(), options),
                Refused(Code::kInvalidArgument, c.text));
    EXPECT_FALSE(plan_layer(tiny.config(), {}, options).ok()) << c.text;
  }
  if (find_backend("sm90") == nullptr) {
    LayerOptions options = tiny_layer_options(16);
    options.backend = "sm90";
    EXPECT_THAT(MoeLayer::open(tiny.config(), tiny.source(), options),
                Refused(Code::kInvalidArgument, "got \"sm90\"; this build has no CUDA backend"));
  }
}

TEST(Layer, RefusesBadBatches) {
  const TinyLayer tiny;
  const auto layer = open_tiny(tiny, tiny_layer_options(8));
  const Buffer workspace = workspace_of(*layer);
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
    EXPECT_THAT(run_in(workspace, *layer, batch), Refused(Code::kInvalidArgument, c.text));
    for (const float value : good.out) ASSERT_EQ(value, -77.0f) << c.text;  // nothing written
  }
  const auto run = [&](std::byte* at, size_t size_bytes) {
    return layer->run(good.batch(), at, size_bytes).code();
  };
  EXPECT_EQ(run(nullptr, workspace.size_bytes()), Code::kInvalidArgument);
  EXPECT_EQ(run(workspace.data() + 16, workspace.size_bytes()), Code::kInvalidArgument);
  EXPECT_EQ(run(workspace.data(), layer->workspace_bytes() - 1), Code::kInvalidArgument);
  EXPECT_EQ(run(workspace.data(), layer->workspace_bytes()), Code::kOk);
  // No tokens are legal, and their run resets the counts.
  EXPECT_OK(run_in(workspace, *layer, Batch{}));
  EXPECT_EQ(must(layer->status(workspace.data(), workspace.size_bytes()))->hidden_blocks, 0u);
}

TEST(Layer, DescribesItsChoices) {
  TinyLayer tiny;
  tiny.scales = {0.3f, 0.2f};
  LayerOptions options = tiny_layer_options();
  options.range = {1, 2};
  Backend backend = kReferenceBackend;
  backend.caveat = "never run on a chip";
  backend.fp8_caveat = "sums have 13 bits";
  const auto described = [&](ActivationFormat format, ActivationScale scale = {}) {
    tiny.options.activation_format = format;
    tiny.options.activation_scale = scale;
    return nlohmann::json::parse(open_tiny(tiny, options, &backend)->describe_json());
  };
  const auto json = described(ActivationFormat::kNvfp4, ActivationScale::kStatic);
  EXPECT_EQ(json["backend"], "reference");
  EXPECT_EQ(json["activation_format"], "nvfp4");
  EXPECT_EQ(json["activation_scale"],
            (nlohmann::json{{"hidden", 0.5}, {"intermediate", "dynamic_token"}}));
  EXPECT_EQ(json["expert_range"]["first"], 1);
  EXPECT_EQ(json["notes"].dump(), R"(["never run on a chip"])");
  for (const char* step : {"route", "quantize", "gemm1_swiglu", "requantize", "gemm2", "combine"})
    EXPECT_TRUE(json["kernels"].contains(step)) << step;
  EXPECT_THAT(described(ActivationFormat::kBf16).dump(),
              AllOf(HasSubstr("rounded to bf16 once"), HasSubstr(R"("hidden":null)")));
  const auto blocks = described(ActivationFormat::kInt8Block);
  EXPECT_EQ(blocks["activation_scale"],
            (nlohmann::json{{"hidden", "dynamic_block"}, {"intermediate", "dynamic_block"}}));
  EXPECT_TRUE(blocks["fp8_weights"].is_null());

  const auto fp8 = described(ActivationFormat::kFp8);
  EXPECT_EQ(fp8["notes"].dump(), R"(["never run on a chip","sums have 13 bits"])");
  EXPECT_EQ(fp8["activation_scale"]["hidden"], "dynamic_token");
  // Inexact: codes of significand 1.5 under five of the eight significands of a scale.
  const int64_t inexact = fp8["fp8_weights"]["inexact"], weights = fp8["fp8_weights"]["weights"];
  EXPECT_EQ(weights, 3 * 2 * 64 * 48);
  EXPECT_GT(inexact, weights / 10);
  EXPECT_LT(inexact, weights / 2);
  EXPECT_LE(fp8["fp8_weights"]["least_shift"], fp8["fp8_weights"]["most_shift"]);
}

TEST(Layer, PlanNeedsNoWeightsAndTellsTheSame) {
  const TinyLayer tiny;
  const auto needs = must(plan_layer(tiny.config(), {}, tiny_layer_options()));
  const auto layer = open_tiny(tiny);
  EXPECT_EQ(needs->plan, layer->plan());
  EXPECT_EQ(needs->packed_bytes, layer->weights().bytes.size_bytes());
}

TEST(Registry, ExplainsEveryBackend) {
  for (size_t i = 1; i < backends().size(); ++i)
    EXPECT_GT(backends()[i - 1]->priority, backends()[i]->priority);
  EXPECT_EQ(find_backend("none"), nullptr);
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
  const auto backend = must(choose_backend(TinyLayer().config(), host_facts(), "auto"));
  ASSERT_EQ(*backend, &kCpuBackend);
  const std::string choice = kCpuBackend.selection();
  ASSERT_EQ(choice.rfind("runs cpu:", 0), 0u) << choice;
  const Backend* chosen = find_backend(choice.substr(5));
  ASSERT_NE(chosen, nullptr) << choice;
  EXPECT_EQ(why_not_here(*chosen), "");
  RecordProperty("auto", chosen->name);
}

// Forced backends that would end in an illegal instruction, and one that declines on every host:
// every way to open one reports what is missing.
TEST(Forced, BackendsThatDeclineAreRefused) {
  const TinyLayer tiny;
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(16, 32, 0.25f, random);
  for (const Backend& backend : cpu_instruction_sets()) {
    const std::string reason = why_not_here(backend);
    if (reason.empty()) continue;  // this host runs it
    SCOPED_TRACE(backend.name);
    EXPECT_THAT(reason, HasSubstr("this one lacks it"));
    LayerOptions options = tiny_layer_options();
    const LinearOptions for_linear{.backend = backend.name, .max_tokens = 1};
    const auto refused = Refused(Code::kUnsupported, reason);
    EXPECT_THAT(MoeLayer::open_on(backend, tiny.config(), tiny.source(), options), refused);
    options.backend = backend.name;
    EXPECT_THAT(MoeLayer::open(tiny.config(), tiny.source(), options), refused);
    EXPECT_THAT(plan_layer(tiny.config(), {}, options), refused);
    EXPECT_THAT(NvfpLinear::open(weight.view(), for_linear), refused);
  }
  Backend declining = kCpuBackend;
  declining.name = "cpu:other";
  declining.supports = [](const MoeConfig&, const DeviceFacts&) {
    return unsupported("expected another CPU");
  };
  EXPECT_THAT(MoeLayer::open_on(declining, tiny.config(), tiny.source(), tiny_layer_options()),
              Refused(Code::kUnsupported, "backend cpu:other: expected another CPU"));
}

}  // namespace
}  // namespace nvfp4_moe::internal
