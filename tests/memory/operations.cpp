#include "memory/operations.h"

#include <fstream>
#include <memory>

#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "moe/c_layer.h"
#include "moe/packed_cache.h"
#include "moe/repro.h"
#include "support/checkpoint_builder.h"
#include "support/gguf_builder.h"
#include "support/write_tensors.h"
#include "verify/calibrate.h"
#include "verify/verify.h"

namespace nvfp4_moe::internal::test {
namespace {

// The Status of a C interface code, with its text.
Status c_status(nvfp4_moe_status code) {
  return code == NVFP4_MOE_STATUS_OK ? Status()
                                     : Status(static_cast<Code>(code), nvfp4_moe_last_error());
}
#define C_TRY(...) NVFP4_MOE_TRY(c_status(__VA_ARGS__))

struct Text {
  char* text = nullptr;
  ~Text() { nvfp4_moe_text_free(text); }
};
using LayerHandle = std::unique_ptr<nvfp4_moe_layer, void (*)(nvfp4_moe_layer*)>;
using CheckpointHandle = std::unique_ptr<nvfp4_moe_checkpoint, void (*)(nvfp4_moe_checkpoint*)>;
using LinearHandle = std::unique_ptr<nvfp4_moe_linear, void (*)(nvfp4_moe_linear*)>;

BuilderOptions builder_options(SourceFormat format) {
  return {.model_type = "qwen3_moe",
          .format = format,
          .layers = 1,
          .num_experts = 3,
          .hidden_size = 64,
          .intermediate_size = 48,
          .shards = format == SourceFormat::kFloat ? 1 : 2};
}

// A host's own threads: both calls on this one.
void host_loop(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context,
               void*) {
  for (int64_t begin = 0; begin < count; begin += grain)
    body(context, begin, std::min(count, begin + grain));
}

Result<CheckpointHandle> open_checkpoint(const std::string& path) {
  nvfp4_moe_checkpoint* checkpoint = nullptr;
  C_TRY(nvfp4_moe_checkpoint_open(path.c_str(), &checkpoint));
  return CheckpointHandle(checkpoint, nvfp4_moe_checkpoint_close);
}

// Everything that the C interface reports about a checkpoint.
Status inspect(const std::string& path) {
  NVFP4_MOE_ASSIGN(const CheckpointHandle checkpoint, open_checkpoint(path));
  Text info, findings, layer;
  C_TRY(nvfp4_moe_checkpoint_info(checkpoint.get(), &info.text));
  C_TRY(nvfp4_moe_checkpoint_findings(checkpoint.get(), -1, &findings.text));
  C_TRY(nvfp4_moe_checkpoint_findings(checkpoint.get(), 0, &layer.text));
  auto config = nvfp4_moe::make<nvfp4_moe_config>();
  return c_status(nvfp4_moe_checkpoint_config(checkpoint.get(), 0, &config));
}

Status open_layer_of(const std::string& path, const std::string& cache, int32_t threads) {
  NVFP4_MOE_ASSIGN(const CheckpointHandle checkpoint, open_checkpoint(path));
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 8;
  options.threads = threads;
  if (!cache.empty()) options.cache_directory = cache.c_str();
  nvfp4_moe_layer* layer = nullptr;
  C_TRY(nvfp4_moe_layer_open_checkpoint(checkpoint.get(), 0, nullptr, &options, &layer));
  nvfp4_moe_layer_close(layer);
  return {};
}

struct Arrays {
  CLayer layer;
  TinyBatch batch;
  Arrays() : layer(options()), batch(layer.tiny.options, 4) {}
  static MoeOptions options() {
    MoeOptions options = tiny_options();
    options.shared_intermediate_size = 32;
    return options;
  }
};

Result<LayerHandle> open_arrays(const Arrays& arrays, const char* backend, bool host) {
  nvfp4_moe_layer_options options = arrays.layer.options;
  options.backend = backend;
  options.threads = host ? 0 : 2;
  if (host) options.parallel_for = host_loop;
  nvfp4_moe_layer* layer = nullptr;
  C_TRY(
      nvfp4_moe_layer_open_tensors(&arrays.layer.config, &arrays.layer.tensors, &options, &layer));
  return LayerHandle(layer, nvfp4_moe_layer_close);
}

Status use_arrays(Arrays& arrays, const char* backend, bool host) {
  NVFP4_MOE_ASSIGN(const LayerHandle layer, open_arrays(arrays, backend, host));
  Text described, described_run;
  C_TRY(nvfp4_moe_layer_describe(layer.get(), &described.text));
  C_TRY(nvfp4_moe_layer_describe_run(layer.get(), 4, &described_run.text));
  size_t bytes = 0;
  C_TRY(nvfp4_moe_layer_workspace_bytes(layer.get(), 4, &bytes));
  NVFP4_MOE_ASSIGN(const Buffer workspace, allocate_pages(bytes));
  const nvfp4_moe_batch batch = c_batch(arrays.batch);
  C_TRY(nvfp4_moe_layer_run(layer.get(), &batch, workspace.data(), bytes, nullptr));
  auto status = nvfp4_moe::make<nvfp4_moe_run_status>();
  C_TRY(nvfp4_moe_layer_run_status(layer.get(), workspace.data(), bytes, &status));
  const nvfp4_moe_expert expert = CLayer::expert(arrays.layer.tiny.experts[1]);
  C_TRY(nvfp4_moe_layer_replace_expert(layer.get(), 0, &expert));
  auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
  C_TRY(nvfp4_moe_layer_unpack_expert(layer.get(), 0, &out));
  Text refused;  // an error's own text
  return nvfp4_moe_layer_describe_run(layer.get(), 99, &refused.text) == NVFP4_MOE_STATUS_OK
             ? check_failed("99 tokens: expected a refusal, got none")
             : Status();
}

Status use_linear(const Arrays& arrays) {
  const Matrix& matrix = arrays.layer.tiny.experts[0].gate;
  auto options = nvfp4_moe::make<nvfp4_moe_linear_options>();
  options.codes = matrix.codes.data();
  options.block_scales = matrix.block_scales.data();
  options.tensor_scale = matrix.tensor_scale;
  options.rows = matrix.rows;
  options.cols = matrix.cols;
  options.max_tokens = 2;
  options.threads = 2;
  nvfp4_moe_linear* opened = nullptr;
  C_TRY(nvfp4_moe_linear_open(&options, &opened));
  const LinearHandle linear(opened, nvfp4_moe_linear_close);
  Text described;
  C_TRY(nvfp4_moe_linear_describe(linear.get(), &described.text));
  size_t bytes = 0;
  C_TRY(nvfp4_moe_linear_workspace_bytes(linear.get(), 2, &bytes));
  NVFP4_MOE_ASSIGN(const Buffer workspace, allocate_pages(bytes));
  const std::vector<uint16_t> x(static_cast<size_t>(2 * matrix.cols), 0x3F80);
  std::vector<uint16_t> out(static_cast<size_t>(2 * matrix.rows));
  auto batch = nvfp4_moe::make<nvfp4_moe_linear_batch>();
  batch.tokens = 2;
  batch.x = x.data();
  batch.out = out.data();
  return c_status(nvfp4_moe_linear_run(linear.get(), &batch, workspace.data(), bytes, nullptr));
}

Status plan(const Arrays& arrays) {
  Text text, reasons;
  size_t bytes = 0;
  C_TRY(nvfp4_moe_plan(&arrays.layer.config, &arrays.layer.options, 0.5f, 0.5f, &text.text, &bytes,
                       nullptr));
  return c_status(nvfp4_moe_explain(&arrays.layer.config, "auto", &reasons.text));
}

Status write_and_replay(Arrays& arrays, const std::string& path) {
  NVFP4_MOE_ASSIGN(const LayerHandle layer, open_arrays(arrays, "reference", false));
  const nvfp4_moe_batch batch = c_batch(arrays.batch);
  size_t bytes = 0;
  C_TRY(nvfp4_moe_layer_workspace_bytes(layer.get(), 4, &bytes));
  NVFP4_MOE_ASSIGN(const Buffer workspace, allocate_pages(bytes));
  C_TRY(nvfp4_moe_layer_run(layer.get(), &batch, workspace.data(), bytes, nullptr));
  C_TRY(nvfp4_moe_layer_write_repro(layer.get(), &batch, 1, path.c_str()));
  Text replayed;
  return c_status(nvfp4_moe_replay(path.c_str(), nullptr, &replayed.text));
}

Status quantize(const OperationFiles& files, OutputFormat format,
                const std::string& calibration = {}) {
  QuantizeOptions options;
  options.calibration = calibration;
  if (!calibration.empty()) options.search = ScaleSearch::kSweep;
  options.format = format;
  options.max_shard_bytes = 8 << 10;
  const auto executor = make_thread_pool(2);
  options.executor = executor.get();
  NVFP4_MOE_ASSIGN(const QuantizeResult result,
                   quantize_checkpoint(files.floats(), files.out(), options));
  return to_json(result).empty() ? check_failed("no report") : Status();
}

Status verify(const OperationFiles& files) {
  VerifyOptions options;
  options.against = files.floats();
  options.states.tokens = 2;
  const auto executor = make_thread_pool(2);
  options.executor = executor.get();
  NVFP4_MOE_ASSIGN(const VerifyReport report, nvfp4_moe::internal::verify(files.packed(), options));
  if (to_json(report).empty()) return check_failed("no report");
  return report.passed() ? Status()
                         : check_failed(report.layers.empty() ? "no layer" : to_json(report));
}

Status calibrate(const OperationFiles& files) {
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(files.packed()));
  CalibrateOptions options;
  options.states.tokens = 2;
  options.moments = files.new_moments();
  NVFP4_MOE_ASSIGN(const Calibration calibration,
                   nvfp4_moe::internal::calibrate(checkpoint, options));
  NVFP4_MOE_TRY(write_input_scales(files.packed(), files.out(), calibration.scales(), 8 << 10, {}));
  return to_json(calibration).empty() ? check_failed("no report") : Status();
}

Status synthesize(const std::string& out) {
  SynthesizeOptions options{.layers = 1,
                            .num_experts = 2,
                            .top_k = 1,
                            .hidden_size = 32,
                            .intermediate_size = 32,
                            .vocab_size = 32};
  const auto executor = make_thread_pool(2);
  options.executor = executor.get();
  return synthesize_checkpoint(out, options).status();
}

}  // namespace

OperationFiles::OperationFiles() {
  EXPECT_OK(CheckpointBuilder(builder_options(SourceFormat::kModelOpt)).write(packed()));
  EXPECT_OK(CheckpointBuilder(builder_options(SourceFormat::kFloat)).write(floats()));
  write_file(gguf(), gguf_model({.experts = 3, .hidden = 64, .layers = 1}).bytes());
  CheckpointBuilder builder(builder_options(SourceFormat::kModelOpt));
  builder.plant(Plant::kNanBlockScale, 0, 1);
  EXPECT_OK(builder.write(broken()));
  write_named_tensors(states(),
                      {tensor("hidden", DType::kBf16, {2, 64}, std::vector<uint16_t>(128))});
  const auto checkpoint = Checkpoint::open(packed());
  EXPECT_OK(checkpoint);
  CalibrateOptions calibration;
  calibration.moments = moments();
  EXPECT_OK(nvfp4_moe::internal::calibrate(*checkpoint, calibration));
  for (const std::string& path : {packed(), floats()}) {  // the files that are copied too
    std::filesystem::create_directories(path + "/tokenizer");
    std::ofstream(path + "/tokenizer/vocab.txt") << "words";
  }
}

namespace {

using Files = OperationFiles;
enum class Leaves { kNothing, kFiles };  // removed before the next run

constexpr struct {
  const char* name;
  Status (*run)(const Files&, Arrays&);
  Leaves leaves = Leaves::kNothing;
  Code expected = Code::kOk;
} kOperations[] = {
    {"inspect", [](const Files& f, Arrays&) { return inspect(f.packed()); }},
    {"inspect_floats", [](const Files& f, Arrays&) { return inspect(f.floats()); }},
    {"inspect_gguf", [](const Files& f, Arrays&) { return inspect(f.gguf()); }},
    {"open_gguf", [](const Files& f, Arrays&) { return open_layer_of(f.gguf(), "", 2); }},
    {"open_checkpoint", [](const Files& f, Arrays&) { return open_layer_of(f.packed(), "", 2); }},
    {"open_broken_checkpoint",
     [](const Files& f, Arrays&) { return open_layer_of(f.broken(), "", 2); }, Leaves::kNothing,
     Code::kBadInput},
    {"open_floats", [](const Files& f, Arrays&) { return open_layer_of(f.floats(), "", 2); }},
    {"open_into_cache",
     [](const Files& f, Arrays&) { return open_layer_of(f.packed(), f.cache(), 2); },
     Leaves::kFiles},
    {"open_from_cache",
     [](const Files& f, Arrays&) { return open_layer_of(f.packed(), f.cache(), 2); }},
    {"open_missing", [](const Files& f, Arrays&) { return inspect(f.out() + "/none"); },
     Leaves::kNothing, Code::kIo},
    {"arrays_cpu", [](const Files&, Arrays& a) { return use_arrays(a, "cpu", false); }},
    {"arrays_reference", [](const Files&, Arrays& a) { return use_arrays(a, "reference", false); }},
    {"arrays_host_threads", [](const Files&, Arrays& a) { return use_arrays(a, "auto", true); }},
    {"linear", [](const Files&, Arrays& a) { return use_linear(a); }},
    {"plan", [](const Files&, Arrays& a) { return plan(a); }},
    {"repro", [](const Files& f, Arrays& a) { return write_and_replay(a, f.repro()); },
     Leaves::kFiles},
    {"quantize", [](const Files& f, Arrays&) { return quantize(f, OutputFormat::kModelOpt); },
     Leaves::kFiles},
    {"quantize_compressed",
     [](const Files& f, Arrays&) { return quantize(f, OutputFormat::kCompressedTensors); },
     Leaves::kFiles},
    {"quantize_calibrated",
     [](const Files& f, Arrays&) { return quantize(f, OutputFormat::kModelOpt, f.moments()); },
     Leaves::kFiles},
    {"verify", [](const Files& f, Arrays&) { return verify(f); }},
    {"calibrate", [](const Files& f, Arrays&) { return calibrate(f); }, Leaves::kFiles},
    {"synthesize", [](const Files& f, Arrays&) { return synthesize(f.out()); }, Leaves::kFiles},
};

}  // namespace

size_t operation_count() { return std::size(kOperations); }
const char* operation_name(size_t number) { return kOperations[number].name; }

std::vector<Operation> operations(const OperationFiles& files) {
  const auto arrays = std::make_shared<Arrays>();
  const auto clear = [&files] {
    for (const std::string& path : {files.out(), files.cache(), files.repro(), files.new_moments()})
      std::filesystem::remove_all(path);
  };
  std::vector<Operation> all;
  for (const auto& one : kOperations)
    all.push_back({one.name, [run = one.run, arrays, &files] { return run(files, *arrays); },
                   one.leaves == Leaves::kFiles ? std::function<void()>(clear) : nullptr,
                   one.expected});
  return all;
}

}  // namespace nvfp4_moe::internal::test
