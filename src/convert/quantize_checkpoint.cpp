// The order of the output is the source's: file by file, tensor by tensor; where a source tensor is an expert's, the
// expert's whole set follows (all experts' sets, where it is a stacked tensor). The list of output tensors, and so
// every shard's boundary, is known before the first weight is read; that is what resuming rests on.
// Long because the plan of a pass, the pass and its resumption rest on one list of tensors.
#include "convert/quantize_checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/float_experts.h"
#include "checkpoint/names.h"
#include "convert/checkpoint_copy.h"
#include "convert/quantize_config.h"
#include "core/float_formats.h"
#include "safetensors/files.h"
#include "safetensors/output_file.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kPlanFile = "quantize.plan.json";
constexpr const char* kStatsFile = "quantize.stats.jsonl";
constexpr int64_t kRowsAtOnce = 32;  // what a thread takes at a time; fixed, so that sums do not depend on the threads

struct ExpertId {
  int64_t layer = 0;
  int64_t expert = 0;
  auto operator<=>(const ExpertId&) const = default;
};

// One step of the output: a tensor to copy, or an expert to quantize.
struct Item {
  TensorIndex::Ref copy;
  ExpertId expert;
  std::string modules[3];  // gate, up, down: "layers.0.ffn.experts.7.w1"
};

struct OutputPlan {
  std::vector<Item> items;
  std::vector<TensorInfo> tensors;
  QuantizedModules modules;
  uint64_t expert_source_bytes = 0;
  uint64_t source_bytes = 0;
  int64_t copied_tensors = 0;
  int64_t quantized_tensors = 0;
};

enum Part { kCodes, kBlockScales, kTensorScale, kInputScale, kParts };

std::string part_name(OutputFormat format, Part part) {
  constexpr const char* kNames[2][kParts] = {
      {"weight", "weight_scale", "weight_scale_2", "input_scale"},
      {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"}};
  return kNames[format == OutputFormat::kCompressedTensors][part];
}

TensorInfo tensor(std::string name, DType dtype, std::vector<int64_t> shape) {
  TensorInfo info;
  info.name = std::move(name);
  info.dtype = dtype;
  info.end = static_cast<uint64_t>(bits(dtype) / 8);
  for (const int64_t d : shape) info.end *= static_cast<uint64_t>(d);
  info.shape = std::move(shape);
  return info;
}

void plan_expert(const MoeOptions& o, OutputFormat format, Item item, OutputPlan& plan) {
  const std::vector<int64_t> scalar =
      format == OutputFormat::kModelOpt ? std::vector<int64_t>{} : std::vector<int64_t>{1};
  for (int p = 0; p < 3; ++p) {
    const int64_t rows = p == 2 ? o.hidden_size : o.intermediate_size;
    const int64_t cols = p == 2 ? o.intermediate_size : o.hidden_size;
    const std::string base = item.modules[p] + ".";
    plan.tensors.push_back(tensor(base + part_name(format, kCodes), DType::kU8, {rows, cols / 2}));
    plan.tensors.push_back(tensor(base + part_name(format, kBlockScales), DType::kF8E4M3, {rows, cols / 16}));
    plan.tensors.push_back(tensor(base + part_name(format, kTensorScale), DType::kF32, scalar));
    plan.tensors.push_back(tensor(base + part_name(format, kInputScale), DType::kF32, scalar));
    plan.modules.modules.push_back(item.modules[p]);
  }
  plan.items.push_back(std::move(item));
}

std::vector<TensorIndex::Ref> in_file_order(const TensorIndex& index) {
  std::vector<TensorIndex::Ref> refs;
  for (const auto& file : index.files()) {
    for (const TensorInfo& info : file->header().tensors) {
      const TensorIndex::Ref ref = index.find(info.name);
      if (ref.file == file.get()) refs.push_back(ref);
    }
  }
  return refs;
}

Result<OutputPlan> make_plan(const Checkpoint& checkpoint, const std::set<int64_t>& layers, OutputFormat format) {
  const FamilyNames* family = family_names(checkpoint.model().family);
  if (family == nullptr) return unsupported("family " + checkpoint.model().family + ": its tensor names are not known");
  OutputPlan plan;
  plan.modules.format = format;
  plan.modules.deepseek_v4 = checkpoint.model().family == "deepseek_v4";
  std::set<ExpertId> planned;
  std::set<std::string> kept_stems;
  for (const TensorIndex::Ref& ref : in_file_order(checkpoint.index())) {
    const TensorInfo& info = *ref.info;
    plan.source_bytes += info.size_bytes();
    const std::optional<MoeTensorName> name = parse_moe_tensor_name(*family, info.name);
    const bool routed = name && name->role != TensorRole::kShared;
    if (routed && name->part == "weight" && layers.contains(name->layer)) {
      plan.expert_source_bytes += info.size_bytes();
      NVFP4_MOE_ASSIGN(const MoeOptions o, checkpoint.layer_options(name->layer));
      const bool stacked = name->role == TensorRole::kStacked;
      plan.quantized_tensors += stacked ? (name->projection == Projection::kGateUp ? 2 : 1) * o.num_experts : 1;
      const std::string stem(name->stem);
      for (int64_t e = stacked ? 0 : name->expert; e < (stacked ? o.num_experts : name->expert + 1); ++e) {
        if (!planned.insert({name->layer, e}).second) continue;
        Item item;
        item.expert = {name->layer, e};
        constexpr Projection kProjections[] = {Projection::kGate, Projection::kUp, Projection::kDown};
        for (int p = 0; p < 3; ++p) {
          item.modules[p] = expert_tensor_name(stem, e, kProjections[p], name->w_words, false, "weight");
          item.modules[p].resize(item.modules[p].size() - std::strlen(".weight"));
        }
        if (plan.modules.expert_stems.empty() || plan.modules.expert_stems.back() != stem)
          plan.modules.expert_stems.push_back(stem);
        plan_expert(o, format, std::move(item), plan);
      }
      continue;
    }
    if (routed) {
      if (kept_stems.insert(std::string(name->stem)).second) plan.modules.kept_stems.emplace_back(name->stem);
    } else if (info.shape.size() == 2 && info.name.ends_with(".weight")) {
      plan.modules.kept.push_back(info.name.substr(0, info.name.size() - std::strlen(".weight")));
    }
    Item item;
    item.copy = ref;
    plan.items.push_back(std::move(item));
    plan.tensors.push_back(tensor(info.name, info.dtype, info.shape));
    if (info.dtype == DType::kF4) plan.tensors.back().end = info.size_bytes();
    ++plan.copied_tensors;
  }
  // Experts of one layer may lie in several source files: stems are listed once.
  std::sort(plan.modules.expert_stems.begin(), plan.modules.expert_stems.end());
  plan.modules.expert_stems.erase(std::unique(plan.modules.expert_stems.begin(), plan.modules.expert_stems.end()),
                                  plan.modules.expert_stems.end());
  return plan;
}

// What the bytes of OUT depend on. Two runs may share shards iff these are equal.
Json plan_json(const std::string& in, const TensorIndex& index, const std::set<int64_t>& layers,
               const QuantizeOptions& options) {
  Json files = Json::array();
  for (const auto& file : index.files()) {
    struct stat info {};
    ::stat(file->path().c_str(), &info);
    files.push_back({{"name", fs::path(file->path()).filename().string()},
                     {"size_bytes", file->size_bytes()},
                     {"modified_ns", int64_t{info.st_mtim.tv_sec} * 1000000000 + info.st_mtim.tv_nsec},
                     {"tensors", file->header().tensors.size()}});
  }
  Json scales = Json::object();
  for (const auto& [layer, s] : options.input_scales)
    scales[std::to_string(layer)] = {s.hidden.value_or(0.0f), s.intermediate.value_or(0.0f)};
  return {{"what", "nvfp4-moe quantize, unfinished"},    {"version", NVFP4_MOE_VERSION},
          {"source", fs::weakly_canonical(in).string()}, {"files", std::move(files)},
          {"format", to_string(options.format)},         {"layers", layers},
          {"scales", to_string(options.scales)},         {"share_gate_up_scale", options.share_gate_up_scale},
          {"input_scales", std::move(scales)},           {"max_shard_bytes", options.max_shard_bytes}};
}

// OUT is new, empty, or an unfinished run of the same plan.
Status claim_output(const std::string& in, const std::string& out, const Json& plan) {
  NVFP4_MOE_TRY(check_apart(in, out));
  std::error_code error;
  fs::create_directories(out, error);
  if (!fs::is_directory(out, error)) return io_error(out + ": cannot create the directory");
  const std::string path = (fs::path(out) / kPlanFile).string();
  if (!fs::exists(path, error)) {
    if (!fs::is_empty(out, error))
      return invalid_argument(out + ": expected a new or empty directory, or an unfinished quantize");
    return write_text_file(path, plan.dump(2) + "\n");
  }
  NVFP4_MOE_ASSIGN(const std::string text, read_text_file(path));
  const Json found = Json::parse(text, nullptr, false);
  if (!found.is_object()) return invalid_argument(path + ": not a plan of quantize; remove " + out + " to start anew");
  for (const auto& [key, value] : plan.items()) {
    if (!found.contains(key) || found[key] != value)
      return invalid_argument(
          fmt::format("{}: an unfinished quantize with another {} (expected {}, found {}); remove it to start anew",
                      out, key, value.dump(), found.value(key, Json()).dump()));
  }
  return {};
}

struct Matrix {
  std::vector<uint8_t> codes;         // (rows, cols/2)
  std::vector<uint8_t> block_scales;  // (rows, cols/16)
  QuantizationQuality quality;
};

// max |w|; kBadInput, naming the place, where an element is NaN or Inf.
Result<double> matrix_amax(const FloatWeights& source, Executor& executor) {
  const int64_t ranges = (source.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  std::vector<float> amax(static_cast<size_t>(ranges));
  executor.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(source.cols));
    for (int64_t range = begin; range < end; ++range) {
      float most = 0;
      const int64_t last = std::min(source.rows, (range + 1) * kRowsAtOnce);
      for (int64_t r = range * kRowsAtOnce; r < last; ++r) {
        source.read_row(r, row.data());
        const float of_row = row_amax(row);
        if (!std::isfinite(of_row)) {
          most = of_row;
          break;
        }
        most = std::max(most, of_row);
      }
      amax[static_cast<size_t>(range)] = most;
    }
  });
  double most = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    const float of_range = amax[static_cast<size_t>(range)];
    if (std::isfinite(of_range)) {
      most = std::max(most, static_cast<double>(of_range));
      continue;
    }
    std::vector<float> row(static_cast<size_t>(source.cols));
    for (int64_t r = range * kRowsAtOnce; r < source.rows; ++r) {
      source.read_row(r, row.data());
      for (int64_t c = 0; c < source.cols; ++c) {
        if (!std::isfinite(row[static_cast<size_t>(c)]))
          return bad_input(fmt::format("{} ({}, {}): expected a finite weight, got {}", source.tensor, r, c,
                                       row[static_cast<size_t>(c)]));
      }
    }
  }
  return most;
}

Status quantize_matrix(const FloatWeights& source, float tensor_scale, ScaleSearch search, Executor& executor,
                       Matrix& out) {
  const int64_t rows = source.rows, cols = source.cols;
  const int64_t ranges = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  out.codes.resize(static_cast<size_t>(rows * cols / 2));
  out.block_scales.resize(static_cast<size_t>(rows * cols / kBlockElems));
  std::vector<QuantizationQuality> quality(static_cast<size_t>(ranges));
  std::vector<Status> status(static_cast<size_t>(ranges));
  executor.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(kRowsAtOnce * cols));
    for (int64_t range = begin; range < end; ++range) {
      const int64_t first = range * kRowsAtOnce;
      const int64_t count = std::min(kRowsAtOnce, rows - first);
      for (int64_t r = 0; r < count; ++r) source.read_row(first + r, x.data() + r * cols);
      QuantizationQuality& q = quality[static_cast<size_t>(range)];
      status[static_cast<size_t>(range)] =
          quantize_weights({x.data(), static_cast<size_t>(count * cols)}, count, cols, tensor_scale, search,
                           out.codes.data() + first * cols / 2, out.block_scales.data() + first * cols / kBlockElems,
                           q.counts, &q.sum_sq, &q.sum_sq_error);
    }
  });
  out.quality = {};
  for (int64_t range = 0; range < ranges; ++range) {
    NVFP4_MOE_TRY(status[static_cast<size_t>(range)].in(source.tensor));
    out.quality += quality[static_cast<size_t>(range)];
  }
  return {};
}

// Below the smallest normal, 1/s would not be finite and compressed-tensors could not say s.
float tensor_scale_of(double amax) { return std::max(tensor_scale_from_amax(amax), 0x1p-126f); }

std::span<const std::byte> bytes_of(const std::vector<uint8_t>& v) { return std::as_bytes(std::span(v)); }

class ExpertQuantizer {
 public:
  ExpertQuantizer(const Checkpoint& checkpoint, const QuantizeOptions& options, Executor& executor,
                  ShardedWriter& writer)
      : checkpoint_(checkpoint), options_(options), executor_(executor), writer_(writer) {}

  // Quantizes the expert and writes its twelve tensors; quality by projection.
  Status run(const Item& item, QuantizationQuality quality[3]) {
    NVFP4_MOE_ASSIGN(const FloatExpert source, float_expert(checkpoint_, item.expert.layer, item.expert.expert));
    const FloatWeights* matrices[] = {&source.gate, &source.up, &source.down};
    for (const FloatWeights* matrix : matrices) matrix->prefetch();
    double amax[3];
    for (int p = 0; p < 3; ++p) {
      NVFP4_MOE_ASSIGN(amax[p], matrix_amax(*matrices[p], executor_));
    }
    if (options_.share_gate_up_scale) amax[0] = amax[1] = std::max(amax[0], amax[1]);
    for (int p = 0; p < 3; ++p) {
      const float scale = tensor_scale_of(amax[p]);
      NVFP4_MOE_TRY(quantize_matrix(*matrices[p], scale, options_.scales, executor_, matrix_));
      matrices[p]->release();
      NVFP4_MOE_TRY(write(item.modules[p] + ".", scale, input_scale(item.expert.layer, p == 2)));
      quality[p] = matrix_.quality;
    }
    return {};
  }

 private:
  float input_scale(int64_t layer, bool down) const {
    const auto found = options_.input_scales.find(layer);
    if (found == options_.input_scales.end()) return 1.0f;
    return (down ? found->second.intermediate : found->second.hidden).value_or(1.0f);
  }

  Status write(const std::string& base, float tensor_scale, float input_scale) {
    const auto put = [&](Part part, std::span<const std::byte> bytes) {
      return writer_.write(base + part_name(options_.format, part), bytes);
    };
    const auto scalar = [&](float value) {
      // compressed-tensors stores what divides, ModelOpt what multiplies.
      return options_.format == OutputFormat::kCompressedTensors ? static_cast<float>(1.0 / static_cast<double>(value))
                                                                 : value;
    };
    const float scales[] = {scalar(tensor_scale), scalar(input_scale)};
    NVFP4_MOE_TRY(put(kCodes, bytes_of(matrix_.codes)));
    NVFP4_MOE_TRY(put(kBlockScales, bytes_of(matrix_.block_scales)));
    NVFP4_MOE_TRY(put(kTensorScale, std::as_bytes(std::span(scales, 1))));
    return put(kInputScale, std::as_bytes(std::span(scales + 1, 1)));
  }

  const Checkpoint& checkpoint_;
  const QuantizeOptions& options_;
  Executor& executor_;
  ShardedWriter& writer_;
  Matrix matrix_;
};

// What each expert's quantization measured, one JSON line an expert beside the plan, so that a resumed run can still
// report on the shards that an earlier one wrote.
class StatsFile {
 public:
  explicit StatsFile(const fs::path& path) : path_(path) {
    std::ifstream in(path_);
    for (std::string line; std::getline(in, line);) {
      const Json json = Json::parse(line, nullptr, false);  // a torn last line is no JSON
      if (!json.is_object() || json.size() != 3 || !json["quality"].is_array() || json["quality"].size() != 3) continue;
      std::array<QuantizationQuality, 3>& q =
          known_[{json.value("layer", int64_t{-1}), json.value("expert", int64_t{-1})}];
      for (size_t p = 0; p < 3; ++p) {
        const Json& v = json["quality"][p];
        if (!v.is_array() || v.size() != 6) continue;
        q[p].sum_sq = v[0].get<double>();
        q[p].sum_sq_error = v[1].get<double>();
        q[p].counts.blocks = v[2].get<uint64_t>();
        q[p].counts.saturated_scales = v[3].get<uint64_t>();
        q[p].counts.zero_scales = v[4].get<uint64_t>();
        q[p].counts.saturated_codes = v[5].get<uint64_t>();
      }
    }
    in.close();
    out_.open(path_, std::ios::app);
  }

  const std::array<QuantizationQuality, 3>* find(ExpertId id) const {
    const auto found = known_.find(id);
    return found == known_.end() ? nullptr : &found->second;
  }

  void add(ExpertId id, const QuantizationQuality quality[3]) {
    Json array = Json::array();
    for (int p = 0; p < 3; ++p) {
      const QuantizationQuality& q = quality[p];
      array.push_back({q.sum_sq, q.sum_sq_error, q.counts.blocks, q.counts.saturated_scales, q.counts.zero_scales,
                       q.counts.saturated_codes});
    }
    out_ << Json{{"layer", id.layer}, {"expert", id.expert}, {"quality", array}}.dump() << std::endl;
  }

 private:
  fs::path path_;
  std::map<ExpertId, std::array<QuantizationQuality, 3>> known_;
  std::ofstream out_;
};

Result<std::set<int64_t>> choose_layers(const ModelInfo& model, const std::vector<int64_t>& wanted) {
  const std::set<int64_t> all(model.layers.begin(), model.layers.end());
  if (all.empty()) return bad_input("no MoE layer with expert weights found");
  if (wanted.empty()) return all;
  for (const int64_t layer : wanted) {
    if (!all.contains(layer))
      return invalid_argument(
          fmt::format("layer {}: expected one of the MoE layers {} to {}", layer, *all.begin(), *all.rbegin()));
  }
  return std::set<int64_t>(wanted.begin(), wanted.end());
}

void add_notes(const QuantizeOptions& options, const OutputPlan& plan, const std::set<int64_t>& layers,
               QuantizeResult& result) {
  int64_t uncalibrated = 0;
  for (const int64_t layer : layers) uncalibrated += !options.input_scales.contains(layer);
  if (uncalibrated > 0)
    result.notes.push_back(
        fmt::format("input_scale is 1.0 in {} of {} layers: not calibrated (activations up to 2688 are representable; "
                    "`calibrate` measures)",
                    uncalibrated, layers.size()));
  if (!options.share_gate_up_scale)
    result.notes.push_back(
        "gate and up keep their own tensor scales: engines that use gate's for both (vLLM) read up wrongly");
  if (!plan.modules.kept_stems.empty()) {
    result.notes.push_back(fmt::format("experts of {} modules stay unquantized", plan.modules.kept_stems.size()));
    if (plan.modules.deepseek_v4)
      result.notes.push_back(
          "engines choose one format for all routed experts of deepseek_v4: a part of its layers serves comparison "
          "only");
  }
}

}  // namespace

const char* to_string(OutputFormat format) { return name_of(format); }

double QuantizationQuality::sqnr_db() const {
  if (sum_sq_error == 0) return std::numeric_limits<double>::infinity();
  return 10.0 * std::log10(sum_sq / sum_sq_error);
}

double QuantizationQuality::relative_error() const { return sum_sq == 0 ? 0 : std::sqrt(sum_sq_error / sum_sq); }

QuantizationQuality& QuantizationQuality::operator+=(const QuantizationQuality& other) {
  sum_sq += other.sum_sq;
  sum_sq_error += other.sum_sq_error;
  counts += other.counts;
  return *this;
}

QuantizationQuality QuantizedLayer::total() const {
  QuantizationQuality sum = gate;
  sum += up;
  sum += down;
  return sum;
}

double QuantizeResult::mean_sqnr_db() const {
  double sum = 0;
  for (const QuantizedLayer& layer : layers) sum += layer.total().sqnr_db();
  return layers.empty() ? 0 : sum / static_cast<double>(layers.size());
}

Result<QuantizeResult> quantize_checkpoint(const std::string& in, const std::string& out,
                                           const QuantizeOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  if (options.max_shard_bytes == 0) return invalid_argument("max_shard_bytes: expected more than 0");
  for (const auto& [layer, scales] : options.input_scales) {
    for (const std::optional<float>& scale : {scales.hidden, scales.intermediate}) {
      if (scale && !(*scale >= 0x1p-126f && std::isfinite(*scale)))
        return invalid_argument(
            fmt::format("input scale of layer {}: expected a positive normal number, got {}", layer, *scale));
    }
  }
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(in));
  if (checkpoint.model().format != SourceFormat::kFloat)
    return unsupported(
        fmt::format("{}: expected BF16, F16 or F32 experts, got {}", in, to_string(checkpoint.model().format)));
  for (const Finding& finding : checkpoint.findings()) {
    if (finding.severity == Severity::kError) return bad_input(to_string(finding));
  }
  NVFP4_MOE_ASSIGN(const std::set<int64_t> layers, choose_layers(checkpoint.model(), options.layers));
  NVFP4_MOE_ASSIGN(OutputPlan plan, make_plan(checkpoint, layers, options.format));
  NVFP4_MOE_ASSIGN(const std::string source_config, read_text_file((fs::path(in) / "config.json").string()));
  NVFP4_MOE_ASSIGN(const ConfigFiles config, quantized_config_files(source_config, plan.modules));
  const Json plan_file = plan_json(in, checkpoint.index(), layers, options);
  NVFP4_MOE_TRY(claim_output(in, out, plan_file));

  Executor& executor = options.executor == nullptr ? serial_executor() : *options.executor;
  NVFP4_MOE_ASSIGN(ShardedWriter writer,
                   ShardedWriter::create(out, plan.tensors, options.max_shard_bytes, {{"format", "pt"}}));
  QuantizeResult result;
  result.format = options.format;
  result.quantized_tensors = plan.quantized_tensors;
  result.copied_tensors = plan.copied_tensors;
  result.source_bytes = plan.source_bytes;
  result.expert_source_bytes = plan.expert_source_bytes;
  result.shards = static_cast<int64_t>(writer.shards());
  result.resumed_shards = static_cast<int64_t>(writer.complete_shards());
  result.written_bytes = writer.data_bytes();

  StatsFile stats(fs::path(out) / kStatsFile);
  ExpertQuantizer quantizer(checkpoint, options, executor, writer);
  std::map<int64_t, QuantizedLayer> by_layer;
  int64_t unmeasured = 0;
  Progress progress{
      "quantize", "", 0, static_cast<int64_t>(plan.items.size()), 0, static_cast<int64_t>(plan.source_bytes), 0};
  for (const Item& item : plan.items) {
    std::string name;
    if (item.copy.info != nullptr) {
      name = item.copy.info->name;
      if (writer.needs(name)) NVFP4_MOE_TRY(copy_tensor(item.copy, writer));
      progress.done_bytes += static_cast<int64_t>(item.copy.info->size_bytes());
    } else {
      name = fmt::format("layer {} expert {}", item.expert.layer, item.expert.expert);
      bool needed = false;
      for (const std::string& module : item.modules) {
        for (int part = 0; part < kParts; ++part)
          needed = needed || writer.needs(module + "." + part_name(options.format, static_cast<Part>(part)));
      }
      QuantizationQuality quality[3];
      if (needed) {
        NVFP4_MOE_TRY(quantizer.run(item, quality).in(name));
        stats.add(item.expert, quality);
      } else if (const auto* known = stats.find(item.expert)) {
        std::copy(known->begin(), known->end(), quality);
      } else {
        ++unmeasured;
      }
      QuantizedLayer& layer = by_layer[item.expert.layer];
      layer.layer = item.expert.layer;
      ++layer.experts;
      layer.gate += quality[0];
      layer.up += quality[1];
      layer.down += quality[2];
      NVFP4_MOE_ASSIGN(const FloatExpert source, float_expert(checkpoint, item.expert.layer, item.expert.expert));
      progress.done_bytes +=
          static_cast<int64_t>(source.gate.size_bytes() + source.up.size_bytes() + source.down.size_bytes());
    }
    ++progress.done;
    progress.item = name;
    progress.elapsed_s = seconds();
    if (options.progress && !options.progress(progress))
      return Status(Code::kCancelled, "quantize: cancelled after " + name);
  }
  NVFP4_MOE_TRY(writer.finish());
  NVFP4_MOE_ASSIGN(result.copied_files, copy_other_files(in, out));
  if (!config.hf_quant_config.empty())
    NVFP4_MOE_TRY(write_text_file((fs::path(out) / "hf_quant_config.json").string(), config.hf_quant_config));
  NVFP4_MOE_TRY(write_text_file((fs::path(out) / "config.json").string(), config.config));
  std::error_code ignored;
  fs::remove(fs::path(out) / kStatsFile, ignored);
  fs::remove(fs::path(out) / kPlanFile, ignored);

  for (const auto& [number, layer] : by_layer) result.layers.push_back(layer);
  add_notes(options, plan, layers, result);
  if (unmeasured > 0)
    result.notes.push_back(fmt::format(
        "{} experts were quantized by an earlier run that left no measurements: they are not in the SQNR", unmeasured));
  result.seconds = seconds();
  return result;
}

}  // namespace nvfp4_moe
