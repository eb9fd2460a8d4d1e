// Writes repros, and reads and replays them; a file is untrusted (format: repro.h).
// Long because writing and reading share one list of tensors.
#include "moe/repro.h"

#include <charconv>
#include <cstring>
#include <map>

#include "io/json.h"
#include "moe/config_json.h"
#include "moe/placed_batch.h"
#include "moe/registry.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {
namespace {

constexpr char kFormat[] = "nvfp4_moe_repro";
constexpr char kVersion[] = "1";
constexpr const char* kProjections[] = {"gate", "up", "down"};

std::string expert_prefix(int64_t local_expert) {
  return local_expert == kSharedExpert ? "shared." : "expert." + std::to_string(local_expert) + ".";
}

// One tensor to write. Borrows its bytes.
struct NamedTensor {
  TensorInfo info;
  const void* data = nullptr;
  size_t size_bytes = 0;
};

NamedTensor named_tensor(std::string name, DType dtype, std::vector<int64_t> shape,
                         const void* data) {
  NamedTensor result;
  result.size_bytes = static_cast<size_t>(bits(dtype) / 8);
  for (const int64_t side : shape) result.size_bytes *= static_cast<size_t>(side);
  result.info.name = std::move(name);
  result.info.dtype = dtype;
  result.info.shape = std::move(shape);
  result.data = data;
  return result;
}

// Decimal text of a float that reads back to the same bits.
std::string float_text(float value) { return Json(static_cast<double>(value)).dump(); }

// ---- reading: the file is untrusted until checked

Result<std::string> metadata_text(const SafetensorsHeader& header, const char* key) {
  const auto found = header.metadata.find(key);
  if (found == header.metadata.end())
    return bad_input(std::string("metadata \"") + key + "\": expected a value, got none");
  return found->second;
}

Result<int64_t> metadata_integer(const SafetensorsHeader& header, const char* key) {
  NVFP4_MOE_ASSIGN(const std::string text, metadata_text(header, key));
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty())
    return bad_input(std::string("metadata \"") + key + "\": expected an integer, got \"" +
                     text.substr(0, 40) + "\"");
  return value;
}

Result<std::optional<float>> metadata_scale(const SafetensorsHeader& header, const char* key) {
  const auto found = header.metadata.find(key);
  if (found == header.metadata.end()) return std::optional<float>();
  const std::string& text = found->second;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() ||
      !(value > 0 && value <= 3.4028234663852886e38))
    return bad_input(std::string("metadata \"") + key + "\": expected a positive number, got \"" +
                     text.substr(0, 40) + "\"");
  return std::optional<float>(static_cast<float>(value));
}

// The tensor, or an error unless it has this dtype and shape.
Result<const TensorInfo*> tensor(const SafetensorsFile& file, const std::string& name, DType dtype,
                                 const std::vector<int64_t>& shape) {
  const TensorInfo* info = file.find(name);
  if (info == nullptr) return bad_input("tensor " + name + ": expected one, got none");
  if (info->dtype != dtype || info->shape != shape)
    return bad_input("tensor " + name + ": expected " + shape_string(shape) + " " +
                     to_string(dtype) + ", got " + describe(*info));
  return info;
}

Result<DType> tensor_dtype(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  if (info == nullptr) return bad_input("tensor " + name + ": expected one, got none");
  return info->dtype;
}

// safetensors does not guarantee the alignment that runs need, so tensors that a run reads are
// copied.
class Aligned {
 public:
  static Result<Aligned> read(const SafetensorsFile& file, const TensorInfo& info) {
    const auto size_bytes = static_cast<size_t>(info.size_bytes());
    Aligned result;
    NVFP4_MOE_ASSIGN(result.buffer_, allocate_pages(std::max<size_t>(size_bytes, 1)));
    NVFP4_MOE_TRY(file.read(file.offset(info), result.buffer_.data(), size_bytes));
    return result;
  }
  void* data() const { return buffer_.data(); }

 private:
  Buffer buffer_;
};

struct Repro {
  std::optional<SafetensorsFile> file;
  std::string recorded_backend;
  std::optional<MoeConfig> config;
  ExpertRange range;
  LayerScales scales;
  int64_t tokens = 0;
  std::optional<Aligned> tensor_scales, hidden, ids, weights, shared_weights, output;
  Batch batch;  // out is null

  // Reads the expert into its storage. Without `bytes` it only checks that its tensors exist with
  // the right shapes, and views are null.
  Result<LoadedExpert> load(int64_t local_expert, bool bytes = true) const {
    const int64_t hidden_size = (*config)->hidden_size;
    const bool shared = local_expert == kSharedExpert;
    const int64_t inner =
        shared ? (*config)->shared_intermediate_size : (*config)->intermediate_size;
    const auto* all_scales = static_cast<const float*>(tensor_scales->data());  // (E [+ 1], 3)
    const float* scales3 = all_scales + 3 * (shared ? range.count : local_expert);
    LoadedExpert loaded;
    Nvfp4View* const views[] = {&loaded.source.gate, &loaded.source.up, &loaded.source.down};
    const int first = first_matrix((*config)->activation);
    for (int p = first; p < 3; ++p) {
      const int64_t rows = p == 2 ? hidden_size : inner;
      const int64_t cols = p == 2 ? inner : hidden_size;
      const std::string name = expert_prefix(local_expert) + kProjections[p];
      NVFP4_MOE_ASSIGN(const TensorInfo* codes,
                       tensor(*file, name + ".codes", DType::kU8, {rows, cols / 2}));
      NVFP4_MOE_ASSIGN(const TensorInfo* block_scales,
                       tensor(*file, name + ".block_scales", DType::kF8E4M3, {rows, cols / 16}));
      if (!bytes) continue;
      const uint8_t* read[2];
      for (size_t i = 0; i < 2; ++i) {
        const TensorInfo& info = i == 0 ? *codes : *block_scales;
        std::vector<uint8_t>& to =
            loaded.storage.emplace_back(static_cast<size_t>(info.size_bytes()));
        NVFP4_MOE_TRY(file->read(file->offset(info), to.data(), to.size()));
        read[i] = to.data();
      }
      *views[p] = Nvfp4View::contiguous(read[0], read[1], scales3[p], rows, cols);
    }
    if (!(*config)->expert_biases || shared) return loaded;
    const float** const biases[] = {&loaded.source.biases.gate, &loaded.source.biases.up,
                                    &loaded.source.biases.down};
    for (int p = first; p < 3; ++p) {
      const std::string name = expert_prefix(local_expert) + kProjections[p] + ".bias";
      NVFP4_MOE_ASSIGN(const TensorInfo* info,
                       tensor(*file, name, DType::kF32, {p == 2 ? hidden_size : inner}));
      if (!bytes) continue;
      std::vector<float> bias(static_cast<size_t>(info->shape[0]));
      NVFP4_MOE_TRY(file->read(file->offset(*info), bias.data(), bias.size() * sizeof(float)));
      *biases[p] = loaded.keep(bias);
    }
    return loaded;
  }
};

Result<Repro> read_repro(const std::string& path) {
  Repro repro;
  NVFP4_MOE_ASSIGN(repro.file, SafetensorsFile::open(path));
  const SafetensorsFile& file = *repro.file;
  const SafetensorsHeader& header = file.header();
  NVFP4_MOE_ASSIGN(const std::string format, metadata_text(header, "format"));
  if (format != kFormat)
    return bad_input(std::string("metadata \"format\": expected ") + kFormat + ", got \"" +
                     format.substr(0, 40) + "\"");
  NVFP4_MOE_ASSIGN(const std::string version, metadata_text(header, "version"));
  if (version != kVersion)
    return bad_input(std::string("metadata \"version\": expected ") + kVersion + ", got \"" +
                     version.substr(0, 40) + "\"");
  NVFP4_MOE_ASSIGN(repro.recorded_backend, metadata_text(header, "backend"));
  NVFP4_MOE_ASSIGN(const std::string config_text, metadata_text(header, "config"));
  NVFP4_MOE_ASSIGN(const MoeOptions options, moe_options_from_json(config_text));
  auto config = MoeConfig::make(options);
  if (!config.ok()) return bad_input("metadata \"config\": " + config.status().message());
  repro.config = *config;
  NVFP4_MOE_ASSIGN(repro.scales.hidden, metadata_scale(header, "hidden_scale"));
  NVFP4_MOE_ASSIGN(repro.scales.intermediate, metadata_scale(header, "intermediate_scale"));

  // Counts come from tensors that are in the file, so that no number from the metadata alone
  // determines an allocation.
  const TensorInfo* scales_info = file.find("tensor_scales");
  const int64_t shared = options.shared_intermediate_size > 0 ? 1 : 0;
  if (scales_info == nullptr || scales_info->dtype != DType::kF32 ||
      scales_info->shape.size() != 2 || scales_info->shape[1] != 3 ||
      scales_info->shape[0] < 1 + shared)
    return bad_input("tensor tensor_scales: expected (experts, 3) F32, got " +
                     (scales_info == nullptr ? std::string("none") : describe(*scales_info)));
  repro.range.count = scales_info->shape[0] - shared;
  NVFP4_MOE_ASSIGN(repro.range.first, metadata_integer(header, "range_first"));
  if (repro.range.first < 0 || repro.range.count > options.num_experts ||
      repro.range.first > options.num_experts - repro.range.count)
    return bad_input("metadata \"range_first\": expected " + std::to_string(repro.range.count) +
                     " experts inside " + std::to_string(options.num_experts) + ", got first " +
                     std::to_string(repro.range.first));
  NVFP4_MOE_ASSIGN(repro.tensor_scales, Aligned::read(file, *scales_info));

  const TensorInfo* hidden_info = file.find("hidden");
  if (hidden_info == nullptr || hidden_info->shape.size() != 2)
    return bad_input("tensor hidden: expected (tokens, " + std::to_string(options.hidden_size) +
                     "), got " +
                     (hidden_info == nullptr ? std::string("none") : describe(*hidden_info)));
  const int64_t tokens = hidden_info->shape[0];
  if (tokens < 1)
    return bad_input("tensor hidden: expected at least one token, got " + describe(*hidden_info));
  Batch& batch = repro.batch;
  batch.tokens = repro.tokens = tokens;

  const auto read = [&](const char* name, DType dtype, std::vector<int64_t> shape,
                        std::optional<Aligned>& into) -> Status {
    NVFP4_MOE_ASSIGN(const TensorInfo* info, tensor(file, name, dtype, shape));
    NVFP4_MOE_ASSIGN(into, Aligned::read(file, *info));
    return {};
  };
  batch.hidden_dtype = hidden_info->dtype;
  if (!is_activation(batch.hidden_dtype))
    return bad_input("tensor hidden: expected BF16, F16 or F32, got " + describe(*hidden_info));
  NVFP4_MOE_TRY(read("hidden", batch.hidden_dtype, {tokens, options.hidden_size}, repro.hidden));
  NVFP4_MOE_ASSIGN(batch.ids_dtype, tensor_dtype(file, "topk_ids"));
  if (batch.ids_dtype != DType::kI32 && batch.ids_dtype != DType::kI64)
    return bad_input("tensor topk_ids: expected I32 or I64, got " +
                     describe(*file.find("topk_ids")));
  NVFP4_MOE_TRY(read("topk_ids", batch.ids_dtype, {tokens, options.top_k}, repro.ids));
  NVFP4_MOE_TRY(read("topk_weights", DType::kF32, {tokens, options.top_k}, repro.weights));
  if (file.find("shared_weights") != nullptr) {
    if (shared == 0)
      return bad_input("tensor shared_weights: expected none (no shared expert), got one");
    NVFP4_MOE_TRY(read("shared_weights", DType::kF32, {tokens}, repro.shared_weights));
    batch.shared_weights = static_cast<const float*>(repro.shared_weights->data());
  }
  batch.out_dtype = batch.hidden_dtype;
  if (file.find("output") != nullptr) {
    NVFP4_MOE_ASSIGN(batch.out_dtype, tensor_dtype(file, "output"));
    if (!is_activation(batch.out_dtype))
      return bad_input("tensor output: expected BF16, F16 or F32, got " +
                       describe(*file.find("output")));
    NVFP4_MOE_TRY(read("output", batch.out_dtype, {tokens, options.hidden_size}, repro.output));
  }
  batch.hidden = repro.hidden->data();
  batch.topk_ids = repro.ids->data();
  batch.topk_weights = static_cast<const float*>(repro.weights->data());

  // Check that every expert's tensors exist before allocating memory in proportion to the config.
  for (int64_t local = 0; local < repro.range.count; ++local)
    NVFP4_MOE_TRY(repro.load(local, false).status());
  if (shared == 1) NVFP4_MOE_TRY(repro.load(kSharedExpert, false).status());
  return repro;
}

}  // namespace

Status write_repro(const std::string& path, const MoeLayer& layer, const Batch& batch,
                   bool with_output) {
  const MoeOptions& options = layer.weights().config.options();
  const PackedWeights& weights = layer.weights();
  NVFP4_MOE_TRY(layer.check_batch(batch, nullptr, 0, with_output));
  if (batch.tokens < 1) return invalid_argument("repro: expected at least one token, got none");
  const WeightUses::Use in_use = layer.use();  // scales and codes must belong together
  if (!in_use) return Status(Code::kBusy, "repro: the layer's weights are being replaced");

  std::map<std::string, std::string> metadata{
      {"format", kFormat},
      {"version", kVersion},
      {"library_version", NVFP4_MOE_VERSION},
      {"backend", layer.backend().name},
      {"config", to_json(options)},
      {"range_first", std::to_string(weights.range.first)},
  };
  if (weights.scales.hidden) metadata["hidden_scale"] = float_text(*weights.scales.hidden);
  if (weights.scales.intermediate)
    metadata["intermediate_scale"] = float_text(*weights.scales.intermediate);

  std::vector<float> scales;  // (E [+ 1], 3)
  for (const TensorScales& one : weights.tensor_scales)
    scales.insert(scales.end(), {one.gate, one.up, one.down});
  const int64_t hidden_size = options.hidden_size;
  std::vector<NamedTensor> named_tensors;
  named_tensors.push_back(named_tensor("tensor_scales", DType::kF32,
                                       {static_cast<int64_t>(weights.tensor_scales.size()), 3},
                                       scales.data()));
  named_tensors.push_back(
      named_tensor("hidden", batch.hidden_dtype, {batch.tokens, hidden_size}, batch.hidden));
  named_tensors.push_back(
      named_tensor("topk_ids", batch.ids_dtype, {batch.tokens, options.top_k}, batch.topk_ids));
  named_tensors.push_back(
      named_tensor("topk_weights", DType::kF32, {batch.tokens, options.top_k}, batch.topk_weights));
  if (batch.shared_weights != nullptr)
    named_tensors.push_back(
        named_tensor("shared_weights", DType::kF32, {batch.tokens}, batch.shared_weights));
  if (with_output)
    named_tensors.push_back(
        named_tensor("output", batch.out_dtype, {batch.tokens, hidden_size}, batch.out));
  const size_t batch_tensors = named_tensors.size();

  const int first = first_matrix(options.activation);
  std::vector<int64_t> experts;
  for (int64_t local = 0; local < weights.range.count; ++local) experts.push_back(local);
  if (options.shared_intermediate_size > 0) experts.push_back(kSharedExpert);
  for (const int64_t expert : experts) {
    const int64_t inner =
        expert == kSharedExpert ? options.shared_intermediate_size : options.intermediate_size;
    for (int p = first; p < 3; ++p) {
      const int64_t rows = p == 2 ? hidden_size : inner;
      const int64_t cols = p == 2 ? inner : hidden_size;
      const std::string name = expert_prefix(expert) + kProjections[p];
      named_tensors.push_back(named_tensor(name + ".codes", DType::kU8, {rows, cols / 2}, nullptr));
      named_tensors.push_back(
          named_tensor(name + ".block_scales", DType::kF8E4M3, {rows, cols / 16}, nullptr));
    }
    if (!options.expert_biases || expert == kSharedExpert) continue;
    for (int p = first; p < 3; ++p)
      named_tensors.push_back(named_tensor(expert_prefix(expert) + kProjections[p] + ".bias",
                                           DType::kF32, {p == 2 ? hidden_size : inner}, nullptr));
  }
  std::vector<TensorInfo> infos;
  for (const NamedTensor& one : named_tensors) infos.push_back(one.info);
  // It contains weights and the tokens' hidden states: only this user may read it.
  NVFP4_MOE_ASSIGN(auto writer,
                   SafetensorsWriter::create(path, std::move(infos), metadata, kPrivateFileMode));
  for (size_t i = 0; i < batch_tensors; ++i)
    NVFP4_MOE_TRY(writer.write(
        {static_cast<const std::byte*>(named_tensors[i].data), named_tensors[i].size_bytes}));
  for (const int64_t expert : experts) {  // one unpacked expert in memory at a time
    ExpertBuffers buffers;
    NVFP4_MOE_TRY(layer.unpack_expert(expert, buffers));
    for (const Nvfp4Buffers* matrix : {&buffers.gate, &buffers.up, &buffers.down}) {
      NVFP4_MOE_TRY(writer.write(std::as_bytes(std::span(matrix->codes))));
      NVFP4_MOE_TRY(writer.write(std::as_bytes(std::span(matrix->block_scales))));
    }
    if (!options.expert_biases || expert == kSharedExpert) continue;
    for (const std::vector<float>* bias :
         {&buffers.gate_bias, &buffers.up_bias, &buffers.down_bias})
      NVFP4_MOE_TRY(writer.write(std::as_bytes(std::span(*bias))));
  }
  return writer.finish();
}

Result<ReplayReport> replay(const std::string& path, const std::string& backend, Executor* executor,
                            const std::string& device) {
  auto opened = read_repro(path);
  if (!opened.ok()) return opened.status().in(path);
  const Repro& repro = *opened;
  const MoeConfig& config = *repro.config;

  LayerSource source;
  source.scales = repro.scales;
  source.name = path;
  source.expert = [&repro](int64_t global_expert) {
    return repro.load(global_expert - repro.range.first);
  };
  source.shared_expert = [&repro] { return repro.load(kSharedExpert); };
  LayerOptions options;
  options.backend = backend;
  options.device = device;
  options.range = repro.range;
  options.limits.max_tokens = repro.tokens;
  options.executor = executor;

  ReplayReport report;
  report.recorded_backend = repro.recorded_backend;
  report.tokens = repro.tokens;
  const int64_t values = repro.tokens * config->hidden_size;
  const size_t out_bytes =
      static_cast<size_t>(values) * static_cast<size_t>(bits(repro.batch.out_dtype) / 8);
  std::vector<std::byte> out(out_bytes), expected(out_bytes);
  const auto floats = [&](const void* from) {
    std::vector<float> wide(static_cast<size_t>(values));
    to_floats(from, repro.batch.out_dtype, values, wide.data());
    return wide;
  };
  const auto run_into = [&](const MoeLayer& layer, std::vector<std::byte>& into,
                            RunStatus* status) -> Status {
    Batch batch = repro.batch;
    batch.out = into.data();
    NVFP4_MOE_ASSIGN(const TimedRun run, run_from_host(layer, batch));
    if (status != nullptr) *status = run.status;
    return {};
  };

  NVFP4_MOE_ASSIGN(const auto layer, MoeLayer::open(config, source, options));
  report.backend = layer->backend().name;
  report.describe = layer->describe_json();
  NVFP4_MOE_TRY(run_into(*layer, out, &report.status));
  options.device = "cpu";
  NVFP4_MOE_ASSIGN(const auto reference,
                   MoeLayer::open_on(kReferenceBackend, config, source, options));
  NVFP4_MOE_TRY(run_into(*reference, expected, nullptr));

  const LayerLimits limits = layer_limits(config);
  const std::vector<float> now = floats(out.data());
  report.with_reference =
      compare(floats(expected.data()).data(), now.data(), repro.tokens, config->hidden_size);
  report.broken_reference_limit = broken_limit(report.with_reference, limits);
  if (repro.output) {
    report.same_bits = std::memcmp(repro.output->data(), out.data(), out_bytes) == 0;
    report.with_output =
        compare(now.data(), floats(repro.output->data()).data(), repro.tokens, config->hidden_size);
    report.broken_output_limit = broken_limit(*report.with_output, limits);
  }
  return report;
}

}  // namespace nvfp4_moe::internal
