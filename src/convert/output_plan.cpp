#include "convert/output_plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "checkpoint/names.h"
#include "core/csf.h"

namespace nvfp4_moe::internal {
namespace {

TensorInfo tensor(std::string name, DType dtype, std::vector<int64_t> shape) {
  TensorInfo info;
  info.name = std::move(name);
  info.dtype = dtype;
  info.end = static_cast<uint64_t>(bits(dtype) / 8);
  for (const int64_t d : shape) info.end *= static_cast<uint64_t>(d);
  info.shape = std::move(shape);
  return info;
}

Status plan_expert(const MoeOptions& o, OutputFormat format, ScaleCoding coding, OutputItem item,
                   OutputPlan& plan) {
  const std::vector<int64_t> scalar =
      format == OutputFormat::kModelOpt ? std::vector<int64_t>{} : std::vector<int64_t>{1};
  for (int p = first_matrix(o.activation); p < 3; ++p) {
    const int64_t rows = p == 2 ? o.hidden_size : o.intermediate_size;
    const int64_t cols = p == 2 ? o.intermediate_size : o.hidden_size;
    const std::string base = item.modules[p] + ".";
    plan.tensors.push_back(tensor(base + part_name(format, kCodes), DType::kU8, {rows, cols / 2}));
    const std::string scales = base + part_name(format, kBlockScales);
    if (coding == ScaleCoding::kCsf) {
      constexpr CsfCodec kCodec = CsfCodec::kNvfp4;
      NVFP4_MOE_TRY(check_csf_shape(kCodec, rows, cols / 16).in(scales));
      plan.tensors.push_back(tensor(scales + std::string(csf_fixed_suffix(kCodec)), DType::kU8,
                                    {rows / 16, csf_tile_bytes(kCodec, cols / 16)}));
      item.exceptions[p] = plan.tensors.size();
      plan.tensors.push_back(
          tensor(scales + std::string(csf_exceptions_suffix(kCodec)), DType::kU32, {0}));
    } else {
      plan.tensors.push_back(tensor(scales, DType::kF8E4M3, {rows, cols / 16}));
    }
    plan.tensors.push_back(tensor(base + part_name(format, kTensorScale), DType::kF32, scalar));
    plan.tensors.push_back(tensor(base + part_name(format, kInputScale), DType::kF32, scalar));
    plan.modules.modules.push_back(item.modules[p]);
  }
  plan.items.push_back(std::move(item));
  return {};
}

std::vector<TensorIndex::Ref> in_file_order(const TensorIndex& index) {
  std::vector<TensorIndex::Ref> refs;
  for (const auto& file : index.files()) {
    for (const TensorInfo& info : file->tensors()) {
      const TensorIndex::Ref ref = index.find(info.name);
      if (ref.file == file.get()) refs.push_back(ref);
    }
  }
  return refs;
}

}  // namespace

std::string part_name(OutputFormat format, MatrixPart part) {
  constexpr const char* kNames[2][kMatrixParts] = {
      {"weight", "weight_scale", "weight_scale_2", "input_scale"},
      {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"}};
  return kNames[format == OutputFormat::kCompressedTensors][part];
}

std::vector<std::string> part_names(OutputFormat format, ScaleCoding coding) {
  std::vector<std::string> names;
  for (int part = 0; part < kMatrixParts; ++part) {
    const std::string name = part_name(format, static_cast<MatrixPart>(part));
    if (part != kBlockScales || coding == ScaleCoding::kPlain) {
      names.push_back(name);
      continue;
    }
    for (const std::string_view suffix :
         {csf_fixed_suffix(CsfCodec::kNvfp4), csf_exceptions_suffix(CsfCodec::kNvfp4)})
      names.push_back(name + std::string(suffix));
  }
  return names;
}

void set_exceptions(OutputPlan& plan, const OutputItem& item, int matrix, int64_t count) {
  TensorInfo& info = plan.tensors[item.exceptions[matrix]];
  info = tensor(info.name, DType::kU32, {count});
}

Result<OutputPlan> make_output_plan(const Checkpoint& checkpoint, const std::set<int64_t>& layers,
                                    OutputFormat format, ScaleCoding coding) {
  const FamilyNames* family = family_names(checkpoint.model().family);
  if (family == nullptr)
    return unsupported("family " + checkpoint.model().family + ": its tensor names are not known");
  OutputPlan plan;
  plan.modules.format = format;
  plan.modules.csf = coding == ScaleCoding::kCsf;
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
      plan.quantized_tensors +=
          stacked ? (name->projection == Projection::kGateUp ? 2 : 1) * o.num_experts : 1;
      const std::string stem = expert_stem(name->stem);
      const Words words = stacked ? Words::kProj : name->words;
      for (int64_t e = stacked ? 0 : name->expert; e < (stacked ? o.num_experts : name->expert + 1);
           ++e) {
        if (!planned.insert({name->layer, e}).second) continue;
        OutputItem item;
        item.expert = {name->layer, e};
        constexpr Projection kProjections[] = {Projection::kGate, Projection::kUp,
                                               Projection::kDown};
        for (int p = first_matrix(o.activation); p < 3; ++p) {
          item.modules[p] = expert_tensor_name(stem, e, kProjections[p], words, false, "weight");
          item.modules[p].resize(item.modules[p].size() - std::strlen(".weight"));
        }
        if (plan.modules.expert_stems.empty() || plan.modules.expert_stems.back() != stem)
          plan.modules.expert_stems.push_back(stem);
        NVFP4_MOE_TRY(plan_expert(o, format, coding, std::move(item), plan));
      }
      continue;
    }
    const std::optional<ExpertsModule> module = experts_module(*family, info.name);
    if (module && !module->shared && layers.contains(module->layer)) {
      ++plan.left_out_tensors;  // it would not apply to experts under their new names
      continue;
    }
    if (routed) {
      if (kept_stems.insert(std::string(name->stem)).second)
        plan.modules.kept_stems.emplace_back(name->stem);
    } else if (info.shape.size() == 2 && info.name.ends_with(".weight")) {
      plan.modules.kept.push_back(info.name.substr(0, info.name.size() - std::strlen(".weight")));
    }
    OutputItem item;
    item.copy = ref;
    plan.items.push_back(std::move(item));
    plan.tensors.push_back(tensor(info.name, info.dtype, info.shape));
    if (info.dtype == DType::kF4) plan.tensors.back().end = info.size_bytes();
    ++plan.copied_tensors;
  }
  // Experts of one layer may be in several source files. Stems are listed once.
  std::sort(plan.modules.expert_stems.begin(), plan.modules.expert_stems.end());
  plan.modules.expert_stems.erase(
      std::unique(plan.modules.expert_stems.begin(), plan.modules.expert_stems.end()),
      plan.modules.expert_stems.end());
  return plan;
}

}  // namespace nvfp4_moe::internal
