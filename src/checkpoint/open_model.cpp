#include "checkpoint/open_model.h"

#include <fmt/format.h>

#include <filesystem>
#include <string_view>
#include <utility>

#include "checkpoint/gguf_config.h"
#include "checkpoint/model_config.h"
#include "checkpoint/unknown_model.h"
#include "core/csf.h"
#include "gguf/gguf.h"
#include "io/files.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {
namespace {

constexpr size_t kMaxConfigBytes = size_t{64} << 20;

// MLX packs eight codes in a 32-bit word, with the scales of blocks as `scales`, and declares it in
// its own terms.
Status check_not_mlx(const TensorIndex& index) {
  for (const auto& [name, ref] : index.tensors()) {
    constexpr std::string_view kCodes = ".weight";
    if (ref.info->dtype != DType::kU32 || !name.ends_with(kCodes) ||
        name.find("mlp") == std::string::npos)
      continue;
    const std::string scales = name.substr(0, name.size() - kCodes.size()) + ".scales";
    if (index.find(scales).info == nullptr) continue;
    return unsupported(
        fmt::format("{}: {} with `scales` is a matrix in MLX's layout, which is not read; quantize "
                    "the float checkpoint",
                    printable(name, 400), describe(*ref.info)));
  }
  return {};
}

Result<OpenedModel> open_gguf_model(const std::string& path) {
  NVFP4_MOE_ASSIGN(GgufModel files, open_gguf(path));
  Result<ModelInfo> model = parse_gguf_config(files.metadata, files.index);
  if (!model.ok()) return model.status().in(printable(files.index.files().front()->path(), 4096));
  return OpenedModel{std::move(files.index), *std::move(model)};
}

struct ModelFolders {
  std::filesystem::path tensors, configs;
};

// A container of CSF has manifest.json, its shards in tensors/ and the files of its source in
// metadata/. Every other model has everything in one folder.
Result<ModelFolders> folders_of(const std::string& path) {
  const std::filesystem::path folder = path;
  const std::string manifest_path = (folder / "manifest.json").string();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) return ModelFolders{folder, {}};
  NVFP4_MOE_ASSIGN(const bool has_config, has_entry((folder / "config.json").string()));
  NVFP4_MOE_ASSIGN(const bool has_manifest, has_entry(manifest_path));
  if (has_config || !has_manifest) return ModelFolders{folder, folder};
  NVFP4_MOE_ASSIGN(const Json manifest, read_json_file(manifest_path));
  const auto text = [&](const char* key) {
    const Json* const value = manifest.is_object() ? member(manifest, key) : nullptr;
    return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
  };
  constexpr std::pair<std::string_view, CsfCodec> kSchemas[] = {
      {"lil-nvfp4-csf-checkpoint/1", CsfCodec::kNvfp4},
      {"lil-mxfp4-csf-checkpoint/1", CsfCodec::kMxfp4}};
  for (const auto& [schema, codec] : kSchemas) {
    if (text("schema") != schema) continue;
    if (text("codec") != csf_codec_name(codec))
      return unsupported(fmt::format("{}: codec: expected {} for {}, got '{}'",
                                     printable(manifest_path, 4096), csf_codec_name(codec), schema,
                                     printable(text("codec"))));
    const Json* const shards = member(manifest, "shards");
    for (const Json& shard : shards != nullptr && shards->is_array() ? *shards : Json::array()) {
      const Json* const file = shard.is_object() ? member(shard, "file") : nullptr;
      const std::string name = file != nullptr && file->is_string() ? file->get<std::string>() : "";
      const std::string file_name = std::filesystem::path(name).filename().string();
      NVFP4_MOE_ASSIGN(const bool there, has_entry((folder / "tensors" / file_name).string()));
      if (!there || !file_name.ends_with(".safetensors"))
        return bad_input(
            fmt::format("{}: shards: expected the files in tensors, got '{}', which "
                        "is not there",
                        printable(manifest_path, 4096), printable(name)));
    }
    return ModelFolders{folder / "tensors", folder / "metadata"};
  }
  return unsupported(
      fmt::format("{}: schema '{}' is not known; expected a config.json next to it, or {} or {}",
                  printable(manifest_path, 4096), printable(text("schema")), kSchemas[0].first,
                  kSchemas[1].first));
}

Result<OpenedModel> open_safetensors_model(const std::string& path, std::string_view family) {
  NVFP4_MOE_ASSIGN(const ModelFolders folders, folders_of(path));
  NVFP4_MOE_ASSIGN(TensorIndex index, TensorIndex::open(folders.tensors.string()));
  const std::filesystem::path directory =
      folders.configs.empty() ? std::filesystem::path(index.directory()) : folders.configs;
  const std::string config_path = (directory / "config.json").string();
  NVFP4_MOE_ASSIGN(const std::string config, read_text_file(config_path, kMaxConfigBytes));
  std::string hf_quant;
  const std::string hf_quant_path = (directory / "hf_quant_config.json").string();
  NVFP4_MOE_ASSIGN(const bool has_hf_quant, has_entry(hf_quant_path));
  if (has_hf_quant) {
    NVFP4_MOE_ASSIGN(hf_quant, read_text_file(hf_quant_path, kMaxConfigBytes));
  }
  NVFP4_MOE_TRY(check_not_mlx(index));
  Result<ModelInfo> model = parse_model_config(config, hf_quant, family);
  if (!model.ok() && model.status().finding() == kUnknownModelType) {
    NVFP4_MOE_ASSIGN(const ParsedConfigs files, parse_config_files(config, hf_quant));
    const std::string text = model.status().message();
    model = unsupported(text.substr(0, text.rfind(" [")) + "; " + advise_family(index, files).text);
  }
  if (!model.ok()) return model.status().in(printable(directory.string(), 4096));
  return OpenedModel{std::move(index), *std::move(model)};
}

}  // namespace

Result<OpenedModel> open_model(const std::string& path, std::string_view family) {
  NVFP4_MOE_ASSIGN(const bool gguf, is_gguf(path));
  if (!gguf) return open_safetensors_model(path, family);
  if (!family.empty())
    return invalid_argument(
        fmt::format("family: expected none for a GGUF file, whose names and fields are one "
                    "architecture's, got {}",
                    printable(family)));
  return open_gguf_model(path);
}

void report_left_out(const TensorIndex::LeftOut& left_out, FindingList& findings) {
  findings.add_folded(
      {Severity::kWarning, "superseded_tensor", -1, -1, "", "",
       "another copy than the one that model.safetensors.index.json names: not read"},
      left_out.superseded);
  findings.add_folded({Severity::kWarning, "unindexed_tensor", -1, -1, "", "",
                       "in a shard, but not in model.safetensors.index.json: not read"},
                      left_out.unindexed);
}

}  // namespace nvfp4_moe::internal
