// A model over its GGUF files: one, or the parts of a split.
//
// llama.cpp names parts NAME-00001-of-0000N.gguf and writes split.no (from 0), split.count and
// split.tensors.count into each. All other metadata is only in the first.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "gguf/gguf.h"
#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".gguf";
constexpr size_t kDigits = 5;
constexpr int64_t kMaxParts = 65535;  // split.count has 16 bits

bool named_like_gguf(std::string_view name) {
  return name.size() > kSuffix.size() && name.ends_with(kSuffix);
}

// "model-00002-of-00005.gguf" -> ("model", 2, 5).
struct PartName {
  std::string stem;
  int64_t number = 0;
  int64_t count = 0;

  std::string of(int64_t part) const {
    return fmt::format("{}-{:05}-of-{:05}{}", stem, part, count, kSuffix);
  }
};

std::optional<int64_t> five_digits(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) return std::nullopt;
  return value;
}

std::optional<PartName> parse_part_name(std::string_view name) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits;  // -00002-of-00005
  if (!named_like_gguf(name)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  if (name.size() <= kTail) return std::nullopt;
  const std::string_view tail = name.substr(name.size() - kTail);
  if (tail[0] != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf) return std::nullopt;
  const std::optional<int64_t> number = five_digits(tail.substr(1, kDigits));
  const std::optional<int64_t> count = five_digits(tail.substr(1 + kDigits + kOf.size()));
  if (!number || !count || *number > *count || *count > kMaxParts) return std::nullopt;
  return PartName{std::string(name.substr(0, name.size() - kTail)), *number, *count};
}

// The only model of a directory, as the name of one of its files.
Result<std::string> only_model(const std::string& directory) {
  NVFP4_MOE_ASSIGN(const std::vector<std::string> names, list_directory(directory));
  std::map<std::string, std::string> models;  // model name -> one of its files
  for (const std::string& name : names) {
    if (!named_like_gguf(name) || name.starts_with("mmproj")) continue;
    const std::optional<PartName> part = parse_part_name(name);
    models.emplace(part ? part->of(1) : name, name);
  }
  const std::string shown = printable(directory, 4096);
  if (models.empty())
    return bad_input(fmt::format("{}: expected a model's {} file, got none", shown, kSuffix));
  if (models.size() > 1)
    return bad_input(fmt::format(
        "{}: expected the files of one model, got {}, such as {} and {}: name one of the files",
        shown, models.size(), printable(models.begin()->first), printable(models.rbegin()->first)));
  return models.begin()->second;
}

Result<std::optional<int64_t>> split_number(const GgufMetadata& metadata, std::string_view key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return std::optional<int64_t>();
  const auto* value = std::get_if<int64_t>(&found->second);
  if (value == nullptr)
    return bad_input(
        fmt::format("metadata '{}': expected an integer, got {}", key, describe(found->second)));
  return std::optional<int64_t>(*value);
}

Status check_split(const GgufMetadata& metadata, std::string_view key, int64_t expected,
                   int64_t otherwise) {
  NVFP4_MOE_ASSIGN(const std::optional<int64_t> value, split_number(metadata, key));
  if (value.value_or(otherwise) == expected) return {};
  return bad_input(fmt::format("metadata '{}': expected {}, as the name of the file says, got {}",
                               key, expected, value ? fmt::to_string(*value) : "none"));
}

}  // namespace

Result<bool> is_gguf(const std::string& path) {
  std::error_code error;
  const fs::file_status facts = fs::status(path, error);
  if (fs::is_directory(facts)) {
    NVFP4_MOE_ASSIGN(const bool indexed,
                     has_entry((fs::path(path) / "model.safetensors.index.json").string()));
    if (indexed) return false;
    // A folder that cannot be listed is an error when it is opened.
    const Result<std::vector<std::string>> names = list_directory(path);
    if (!names.ok()) return false;
    const bool safetensors = std::any_of(names->begin(), names->end(), [](const std::string& name) {
      return name.ends_with(".safetensors");
    });
    return !safetensors && std::any_of(names->begin(), names->end(), named_like_gguf);
  }
  if (!fs::is_regular_file(facts)) return false;
  if (named_like_gguf(path)) return true;
  // File names in caches are hashes. As safetensors, these bytes would be a length that no header
  // has.
  const Result<std::string> head = read_first_bytes(path, 4);
  return head.ok() && *head == "GGUF";
}

Result<GgufModel> open_gguf(const std::string& path) {
  std::error_code error;
  const bool is_directory = fs::is_directory(path, error);
  const fs::path parent = fs::path(path).parent_path();
  const std::string directory = is_directory     ? path
                                : parent.empty() ? std::string(".")
                                                 : parent.string();
  std::string name = fs::path(path).filename().string();
  if (is_directory) {
    NVFP4_MOE_ASSIGN(name, only_model(path));
  }
  const std::optional<PartName> part = parse_part_name(name);
  const int64_t count = part ? part->count : 1;
  GgufModel out;
  std::vector<std::unique_ptr<TensorFile>> files;
  int64_t tensors = 0;
  std::optional<int64_t> declared;
  for (int64_t i = 0; i < count; ++i) {
    const std::string file_name = part ? part->of(i + 1) : name;
    const std::string file_path =
        part || is_directory ? (fs::path(directory) / file_name).string() : path;
    if (part) {
      NVFP4_MOE_ASSIGN(const bool there, has_entry(file_path));
      if (!there)
        return bad_input(fmt::format("{}: expected the {} parts of the model, got no {}",
                                     printable(directory, 4096), count, printable(file_name)));
    }
    NVFP4_MOE_ASSIGN(GgufFile file, GgufFile::open(file_path));
    const GgufMetadata& metadata = file.header().metadata;
    const std::string shown = printable(file_path, 4096);
    NVFP4_MOE_TRY(check_split(metadata, "split.no", i, part ? -1 : 0).in(shown));
    NVFP4_MOE_TRY(check_split(metadata, "split.count", count, part ? -1 : 1).in(shown));
    if (i == 0) {
      Result<std::optional<int64_t>> said = split_number(metadata, "split.tensors.count");
      if (!said.ok()) return said.status().in(shown);
      declared = *said;
      out.metadata = metadata;
    }
    tensors += static_cast<int64_t>(file.tensors().size());
    files.push_back(std::make_unique<GgufFile>(std::move(file)));
  }
  if (declared && *declared != tensors)
    return bad_input(
        fmt::format("{}: metadata 'split.tensors.count': expected {}, as the parts hold, got {}",
                    printable(files.front()->path(), 4096), tensors, *declared));
  NVFP4_MOE_ASSIGN(out.index, TensorIndex::of(directory, std::move(files)));
  return out;
}

}  // namespace nvfp4_moe::internal
