#include "memory/operations.h"

#include <fstream>
#include <memory>

#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "moe/c_layer.h"
#include "support/checkpoint_builder.h"
#include "support/gguf_builder.h"
#include "support/write_tensors.h"
#include "verify/calibrate.h"
#include "verify/verify.h"

namespace nvfp4_moe::internal::test {
namespace {

BuilderOptions builder_options(SourceFormat format) {
  return {.model_type = "qwen3_moe",
          .format = format,
          .layers = 1,
          .num_experts = 3,
          .hidden_size = 64,
          .intermediate_size = 48,
          .shards = format == SourceFormat::kFloat ? 1 : 2};
}

// ---- through the C interface and its C++ header, whose errors are thrown

// Everything that is reported about a checkpoint.
Status inspect(const std::string& path) {
  const nvfp4_moe::Checkpoint checkpoint(path);
  checkpoint.info();
  checkpoint.findings();
  checkpoint.findings(0);
  checkpoint.config(0);
  return {};
}

Status open_layer_of(const std::string& path, const std::string& cache = "") {
  const nvfp4_moe::Checkpoint checkpoint(path);
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 8;
  options.threads = 2;
  if (!cache.empty()) options.cache_directory = cache.c_str();
  const nvfp4_moe::Layer layer(checkpoint, 0, options);
  return {};
}

MoeOptions shared_options() {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  return options;
}
struct Arrays {
  CLayer layer{shared_options()};
  TinyBatch batch{layer.tiny.options, 4};
};

// A host's own threads: both calls on this one.
void host_loop(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context,
               void*) {
  for (int64_t begin = 0; begin < count; begin += grain)
    body(context, begin, std::min(count, begin + grain));
}

nvfp4_moe::Layer open_arrays(const Arrays& arrays, const char* backend, bool host = false) {
  nvfp4_moe_layer_options options = arrays.layer.options;
  options.backend = backend;
  options.threads = host ? 0 : 2;
  if (host) options.parallel_for = host_loop;
  return nvfp4_moe::Layer(arrays.layer.config, arrays.layer.tensors, options);
}

Status use_arrays(Arrays& arrays, const char* backend, bool host = false) {
  nvfp4_moe::Layer layer = open_arrays(arrays, backend, host);
  layer.describe();
  layer.describe_run(4);
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(4));
  layer.run(c_batch(arrays.batch), workspace);
  layer.status(workspace);
  layer.replace_expert(0, CLayer::expert(arrays.layer.tiny.experts[1]));
  auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
  layer.unpack_expert(0, out);
  try {  // an error's own text
    layer.describe_run(99);
  } catch (const nvfp4_moe::Error& error) {
    if (error.status() == kInvalid) return {};
    throw;
  }
  return check_failed("99 tokens: expected a refusal, got none");
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
  const nvfp4_moe::Linear linear(options);
  linear.describe();
  const nvfp4_moe::Workspace workspace(linear.workspace_bytes(2));
  const std::vector<uint16_t> x(static_cast<size_t>(2 * matrix.cols), 0x3F80);
  std::vector<uint16_t> out(static_cast<size_t>(2 * matrix.rows));
  auto batch = nvfp4_moe::make<nvfp4_moe_linear_batch>();
  batch.tokens = 2;
  batch.x = x.data();
  batch.out = out.data();
  linear.run(batch, workspace);
  return {};
}

Status plan(const Arrays& arrays) {
  nvfp4_moe::plan(arrays.layer.config, arrays.layer.options, 0.5f, 0.5f);
  nvfp4_moe::explain(arrays.layer.config, "auto");
  return {};
}

Status write_and_replay(Arrays& arrays, const std::string& path) {
  const nvfp4_moe::Layer layer = open_arrays(arrays, "reference");
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(4));
  layer.run(c_batch(arrays.batch), workspace);
  layer.write_repro(c_batch(arrays.batch), path);
  nvfp4_moe::replay(path);
  return {};
}

// ---- operations on checkpoints

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
  const std::string json = to_json(report);
  return report.passed() && !json.empty() ? Status() : check_failed(json);
}

Status calibrate(const OperationFiles& files) {
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(files.packed()));
  CalibrateOptions options;
  options.states.tokens = 2;
  options.moments = files.new_moments();
  NVFP4_MOE_ASSIGN(const Calibration calibration,
                   nvfp4_moe::internal::calibrate(checkpoint, options));
  NVFP4_MOE_TRY(write_input_scales(files.packed(), files.out(), calibration.scales(), 8 << 10, {}));
  return calibration.layers.empty() ? check_failed("no layer") : Status();
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
    {"open_gguf", [](const Files& f, Arrays&) { return open_layer_of(f.gguf()); }},
    {"open_checkpoint", [](const Files& f, Arrays&) { return open_layer_of(f.packed()); }},
    {"open_broken_checkpoint", [](const Files& f, Arrays&) { return open_layer_of(f.broken()); },
     Leaves::kNothing, Code::kBadInput},
    {"open_floats", [](const Files& f, Arrays&) { return open_layer_of(f.floats()); }},
    {"open_into_cache",
     [](const Files& f, Arrays&) { return open_layer_of(f.packed(), f.cache()); }, Leaves::kFiles},
    {"open_from_cache",
     [](const Files& f, Arrays&) { return open_layer_of(f.packed(), f.cache()); }},
    {"open_missing", [](const Files& f, Arrays&) { return inspect(f.out() + "/none"); },
     Leaves::kNothing, Code::kIo},
    {"arrays_cpu", [](const Files&, Arrays& a) { return use_arrays(a, "cpu"); }},
    {"arrays_reference", [](const Files&, Arrays& a) { return use_arrays(a, "reference"); }},
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

OperationFiles::OperationFiles() {
  EXPECT_OK(CheckpointBuilder(builder_options(SourceFormat::kModelOpt)).write(packed()));
  EXPECT_OK(CheckpointBuilder(builder_options(SourceFormat::kFloat)).write(floats()));
  write_file(gguf(), gguf_model({.experts = 3, .hidden = 64, .layers = 1}).bytes());
  CheckpointBuilder builder(builder_options(SourceFormat::kModelOpt));
  builder.plant(Plant::kNanBlockScale, 0, 1);
  EXPECT_OK(builder.write(broken()));
  write_named_tensors(states(),
                      {tensor("hidden", DType::kBf16, {2, 64}, std::vector<uint16_t>(128))});
  CalibrateOptions calibration;
  calibration.moments = moments();
  EXPECT_OK(nvfp4_moe::internal::calibrate(*must(Checkpoint::open(packed())), calibration));
  for (const std::string& path : {packed(), floats()}) {  // the files that are copied too
    std::filesystem::create_directories(path + "/tokenizer");
    std::ofstream(path + "/tokenizer/vocab.txt") << "words";
  }
}

size_t operation_count() { return std::size(kOperations); }
const char* operation_name(size_t number) { return kOperations[number].name; }

std::vector<Operation> operations(const OperationFiles& files) {
  const auto arrays = std::make_shared<Arrays>();
  const auto clear = [&files] {
    for (const std::string& path : {files.out(), files.cache(), files.repro(), files.new_moments()})
      std::filesystem::remove_all(path);
  };
  std::vector<Operation> all;
  for (const auto& one : kOperations) {
    const auto run = [run = one.run, arrays, &files]() -> Status {
      try {
        return run(files, *arrays);
      } catch (const nvfp4_moe::Error& error) {
        return {static_cast<Code>(error.status()), error.what()};
      }
    };
    all.push_back({one.name, run,
                   one.leaves == Leaves::kFiles ? std::function<void()>(clear) : nullptr,
                   one.expected});
  }
  return all;
}

}  // namespace nvfp4_moe::internal::test
