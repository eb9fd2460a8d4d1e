#include "checkpoint/expert_names.h"

#include <fmt/format.h>

#include "checkpoint/gguf_names.h"
#include "core/printable.h"
#include "gguf/gguf.h"

namespace nvfp4_moe::internal {
namespace {

constexpr FormatParts kModelOptParts = {SourceFormat::kModelOpt, "weight", "weight_scale",
                                        "weight_scale_2", "input_scale"};
constexpr FormatParts kCompressedParts = {SourceFormat::kCompressedTensors, "weight_packed",
                                          "weight_scale", "weight_global_scale",
                                          "input_global_scale"};
constexpr FormatParts kFloatParts = {SourceFormat::kFloat, "weight", "", "", ""};

constexpr FormatParts mxfp4_parts(std::string_view codes, std::string_view scales) {
  return {SourceFormat::kMxfp4, codes, scales, "", ""};
}

// In GGUF the tensor type gives the format. A layer may lack all scalars of a kind. Its tensor
// scales are then 1, as in llama.cpp.
Result<FormatParts> detect_gguf_format(const TensorIndex& index, const ExpertNames& names,
                                       int64_t expert, Projection projection) {
  const TensorInfo* weight = index.find(names.name(expert, projection, "weight")).info;
  if (weight == nullptr)
    return bad_input(
        fmt::format("{}: missing", printable(names.name(expert, projection, "weight"), 400)));
  const auto part_of_any = [&](std::string_view part) {
    for (const Projection one : names.projections())
      if (index.find(names.name(expert, one, part)).info != nullptr) return part;
    return std::string_view();
  };
  if (weight->blocks == ggml_nvfp4())
    return FormatParts{SourceFormat::kGgufNvfp4,   "weight",      "", part_of_any("scale"),
                       part_of_any("input_scale"), weight->blocks};
  if (weight->blocks == ggml_mxfp4())
    return FormatParts{SourceFormat::kMxfp4, "weight", "", "", "", weight->blocks};
  if (weight->blocks == nullptr && is_activation(weight->dtype)) return kFloatParts;
  return unsupported(fmt::format("{} experts are not NVFP4, MXFP4 or floats",
                                 weight->blocks ? weight->blocks->name : to_string(weight->dtype)));
}

}  // namespace

std::string ExpertNames::name(int64_t expert, Projection projection, std::string_view part) const {
  const Projection stored = in_fused(projection) ? Projection::kGateUp : projection;
  if (gguf) return gguf_tensor_name(stem, role, stored, part);
  switch (role) {
    case TensorRole::kExpert:
      return expert_tensor_name(stem, expert, projection, words, projection_first, part);
    case TensorRole::kStacked: return stacked_tensor_name(stem, stored, words, dotted, part);
    case TensorRole::kShared: return shared_tensor_name(stem, stored, words, part);
  }
  return "";
}

Result<FormatParts> detect_format(const TensorIndex& index, const ExpertNames& names,
                                  int64_t expert, Projection projection) {
  if (names.gguf) return detect_gguf_format(index, names, expert, projection);
  const auto part = [&](std::string_view p) {
    return index.find(names.name(expert, projection, p)).info;
  };
  const auto shown = [&](std::string_view p) {
    return printable(names.name(expert, projection, p), 400);
  };
  const TensorInfo* weight = part("weight");
  const TensorInfo* packed = part("weight_packed");
  const auto is_coded = [&](std::string_view p, CsfCodec codec) {
    return part(std::string(p).append(csf_fixed_suffix(codec))) != nullptr;
  };
  const auto has_e8m0 = [&](std::string_view p) {
    const TensorInfo* t = part(p);
    return (t != nullptr && (t->dtype == DType::kF8E8M0 || t->dtype == DType::kU8)) ||
           is_coded(p, CsfCodec::kMxfp4);
  };
  const auto has_scales = [&](std::string_view p) {
    return part(p) != nullptr || is_coded(p, CsfCodec::kNvfp4) || is_coded(p, CsfCodec::kMxfp4);
  };
  if (packed != nullptr) {
    const bool global = part("weight_global_scale") != nullptr;
    return !global && has_e8m0("weight_scale") ? mxfp4_parts("weight_packed", "weight_scale")
                                               : kCompressedParts;
  }
  if (part("blocks") != nullptr) return mxfp4_parts("blocks", "scales");
  if (weight == nullptr) return bad_input(fmt::format("{}: missing", shown("weight")));
  if (weight->dtype == DType::kF8E4M3 || weight->dtype == DType::kF8E5M2) {
    return unsupported("FP8 experts are not NVFP4");
  }
  if (weight->dtype == DType::kU32 && part("scales") != nullptr)
    return unsupported(
        "codes in 32-bit words with `scales` are MLX's layout, which is not read; quantize the "
        "float checkpoint");
  if (part("weight_scale_2") != nullptr) return kModelOptParts;
  const bool bytes =
      weight->dtype == DType::kU8 || weight->dtype == DType::kI8 || weight->dtype == DType::kF4;
  if (bytes && has_e8m0("scale")) return mxfp4_parts("weight", "scale");
  if (bytes && has_e8m0("weight_scale")) return mxfp4_parts("weight", "weight_scale");
  if (bytes && has_scales("weight_scale"))
    return kModelOptParts;  // its missing weight_scale_2 is reported later
  if (is_activation(weight->dtype) && !has_scales("weight_scale") && !has_scales("scale"))
    return kFloatParts;
  return bad_input(
      fmt::format("{}: {} is none of ModelOpt NVFP4, compressed-tensors NVFP4, MXFP4 and floats",
                  shown("weight"), describe(*weight)));
}

std::string stored_instead(const TensorIndex& index, const ExpertNames& names, int64_t expert,
                           Projection projection) {
  for (const std::string_view part : {"weight", "weight_packed"}) {
    const std::string name = names.name(expert, projection, part);
    const TensorInfo* stored = part == names.parts.codes ? nullptr : index.find(name).info;
    if (stored != nullptr)
      return fmt::format("{} in another format, {}", printable(name, 400), describe(*stored));
  }
  return std::string(index.absence(names.name(expert, projection, names.parts.codes)));
}

bool is_format_part(std::string_view part, bool biased) {
  if (part == "bias" || part == "blocks") return biased;
  for (const CsfCodec codec : {CsfCodec::kNvfp4, CsfCodec::kMxfp4}) {
    for (const std::string_view suffix : {csf_fixed_suffix(codec), csf_exceptions_suffix(codec)}) {
      if (!part.ends_with(suffix)) continue;
      part.remove_suffix(suffix.size());
      return part == "weight_scale" || (part == "scale" && codec == CsfCodec::kMxfp4);
    }
  }
  return kModelOptParts.has(part) || kCompressedParts.has(part) || part == "scale" ||
         part == "scales";
}

bool is_csf(const TensorIndex& index, const ExpertNames& names, int64_t expert,
            Projection projection) {
  if (names.parts.scales.empty()) return false;
  const std::string scales = names.name(expert, projection, names.parts.scales);
  const CsfCodec codec = names.parts.csf_codec();
  return index.find(scales + std::string(csf_fixed_suffix(codec))).info != nullptr ||
         index.find(scales + std::string(csf_exceptions_suffix(codec))).info != nullptr;
}

}  // namespace nvfp4_moe::internal
