// A checkpoint's tensors over its files: from model.safetensors.index.json, from a directory
// listing, or from one file.
//
// The index decides: a tensor is read from the shard that the map gives for it. Other copies of it
// (base shards under an overlay) and tensors that the map does not name (leftovers of the source
// model) are counted and not read. Without an index, a name in two files is refused. Files that the
// map does not name are not opened, since a directory may have the model a second time in another
// layout.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include "io/files.h"
#include "io/json_strict.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

// Whether the name is a shard in the same directory.
bool is_plain_shard_name(std::string_view name) {
  return name.size() > kSuffix.size() && name.size() <= 255 && name.ends_with(kSuffix) &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

using WeightMap = std::map<std::string, std::string, std::less<>>;  // tensor -> shard

Result<WeightMap> read_weight_map(const std::string& path) {
  JsonLimits limits;
  limits.max_depth = 8;
  limits.non_finite = true;  // in metadata, which is not read
  NVFP4_MOE_ASSIGN(const Json index, read_json_file(path, limits));
  const std::string shown = printable(path, 4096);
  if (!index.is_object())
    return bad_input(
        fmt::format("{}: expected an object with weight_map, got {}", shown, describe_json(index)));
  if (index.contains("metadata") && !index["metadata"].is_object())
    return bad_input(fmt::format("{}: metadata: expected an object, got {}", shown,
                                 describe_json(index["metadata"])));
  if (!index.contains("weight_map"))
    return bad_input(fmt::format("{}: expected weight_map, got none", shown));
  const Json& map = index["weight_map"];
  if (!map.is_object() || map.empty())
    return bad_input(fmt::format("{}: weight_map: expected an object of tensor to file, got {}",
                                 shown, describe_json(map)));
  WeightMap result;
  for (const auto& [tensor, file] : map.items()) {
    if (!file.is_string() || !is_plain_shard_name(file.text()))
      return bad_input(
          fmt::format("{}: weight_map: tensor '{}': expected the plain name of a .safetensors file "
                      "beside it, got {}",
                      shown, printable(tensor), describe_json(file)));
    result.emplace(tensor, file.text());
  }
  return result;
}

// "model-00002-of-00005.safetensors" -> ("model-", 2, 5).
struct ShardName {
  std::string stem;
  uint32_t number = 0;
  uint32_t count = 0;
};
std::optional<ShardName> parse_shard_name(std::string_view name) {
  name.remove_suffix(kSuffix.size());
  const size_t of = name.rfind("-of-");
  if (of == std::string_view::npos) return std::nullopt;
  const size_t dash = of == 0 ? std::string_view::npos : name.rfind('-', of - 1);
  if (dash == std::string_view::npos) return std::nullopt;
  const auto number = [](std::string_view digits) -> std::optional<uint32_t> {
    uint32_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
    return value;
  };
  const auto index = number(name.substr(dash + 1, of - dash - 1));
  const auto count = number(name.substr(of + 4));
  if (!index || !count) return std::nullopt;
  return ShardName{std::string(name.substr(0, dash + 1)), *index, *count};
}

// Without an index, only the numbers can reveal a missing shard.
Status check_shards_complete(const std::string& directory, const std::vector<std::string>& names) {
  std::map<std::pair<std::string, uint32_t>, std::set<uint32_t>> sets;
  for (const std::string& name : names)
    if (const auto shard = parse_shard_name(name))
      sets[{shard->stem, shard->count}].insert(shard->number);
  for (const auto& [key, numbers] : sets)
    if (numbers.size() != key.second || *numbers.rbegin() - *numbers.begin() + 1 != key.second)
      return bad_input(fmt::format("{}: expected the {} shards {}*-of-{:05}{}, got {}",
                                   printable(directory, 4096), key.second, printable(key.first),
                                   key.second, kSuffix, numbers.size()));
  return {};
}

Result<std::vector<std::string>> list_safetensors(const std::string& directory) {
  NVFP4_MOE_ASSIGN(std::vector<std::string> names, list_directory(directory));
  std::erase_if(names, [](const std::string& name) {
    return name.size() <= kSuffix.size() || !name.ends_with(kSuffix);
  });
  if (names.empty())
    return bad_input(fmt::format("{}: expected {} or *{} files, got neither",
                                 printable(directory, 4096), kIndexName, kSuffix));
  NVFP4_MOE_TRY(check_shards_complete(directory, names));
  return names;
}

// "organization/model": also a relative path, so it only adds a hint to an error.
bool may_be_hub_name(const std::string& path) {
  return std::count(path.begin(), path.end(), '/') == 1 && path.front() != '.' &&
         path.front() != '/' && path.back() != '/';
}

}  // namespace

Result<TensorIndex> TensorIndex::open(const std::string& path) {
  std::error_code error;
  const fs::file_status facts = fs::status(path, error);
  if (!fs::exists(facts) || !fs::status_known(facts)) {
    const Status status = errno_status(path, "cannot open", error ? error.value() : ENOENT);
    if (fs::exists(facts) || !may_be_hub_name(path)) return status;
    return Status{status.code(),
                  status.message() +
                      "; expected a local directory or file: a model of a hub must be "
                      "downloaded first"};
  }

  TensorIndex index;
  std::vector<std::string> names;
  std::optional<WeightMap> weight_map;
  if (fs::is_directory(facts)) {
    index.directory_ = path;
    const std::string index_path = (fs::path(path) / kIndexName).string();
    NVFP4_MOE_ASSIGN(const bool indexed, has_entry(index_path));
    if (indexed) {
      NVFP4_MOE_ASSIGN(weight_map, read_weight_map(index_path));
      std::set<std::string> shards;
      for (const auto& [tensor, shard] : *weight_map) shards.insert(shard);
      names.assign(shards.begin(), shards.end());
    } else {
      NVFP4_MOE_ASSIGN(names, list_safetensors(path));
    }
  } else {
    index.directory_ =
        fs::path(path).has_parent_path() ? fs::path(path).parent_path().string() : std::string(".");
    names.push_back(fs::path(path).filename().string());
  }

  for (const std::string& name : names) {
    const std::string file_path =
        fs::is_directory(facts) ? (fs::path(index.directory_) / name).string() : path;
    if (weight_map) {
      NVFP4_MOE_ASSIGN(const bool there, has_entry(file_path));
      if (!there)
        return bad_input(fmt::format("{}: weight_map names shard '{}', which is not there",
                                     printable((fs::path(path) / kIndexName).string(), 4096),
                                     printable(name)));
    }
    NVFP4_MOE_ASSIGN(SafetensorsFile opened, SafetensorsFile::open(file_path));
    const auto is_read = [&](const std::string& tensor) {
      if (!weight_map) return true;
      const auto mapped = weight_map->find(tensor);
      if (mapped == weight_map->end()) {
        index.left_out_.unindexed.push_back(tensor);
      } else if (mapped->second != name) {
        index.left_out_.superseded.push_back(tensor);
      } else {
        return true;
      }
      return false;
    };
    NVFP4_MOE_TRY(index.add(std::make_unique<SafetensorsFile>(std::move(opened)), is_read));
  }
  std::sort(index.left_out_.superseded.begin(), index.left_out_.superseded.end());
  std::sort(index.left_out_.unindexed.begin(), index.left_out_.unindexed.end());
  if (weight_map)
    for (const auto& [tensor, shard] : *weight_map)
      if (!index.tensors_.contains(tensor))
        return bad_input(
            fmt::format("{}: tensor '{}': the index places it in '{}', which does not hold it",
                        printable((fs::path(path) / kIndexName).string(), 4096), printable(tensor),
                        printable(shard)));
  return index;
}

Result<TensorIndex> TensorIndex::of(std::string directory,
                                    std::vector<std::unique_ptr<TensorFile>> files) {
  TensorIndex index;
  index.directory_ = std::move(directory);
  for (auto& file : files) NVFP4_MOE_TRY(index.add(std::move(file)));
  return index;
}

Status TensorIndex::add(std::unique_ptr<TensorFile> file,
                        const std::function<bool(const std::string&)>& is_read) {
  files_.push_back(std::move(file));
  const TensorFile* held = files_.back().get();
  for (const TensorInfo& info : held->tensors()) {
    if (is_read && !is_read(info.name)) continue;
    const auto [position, inserted] = tensors_.emplace(info.name, Ref{held, &info});
    if (!inserted)
      return bad_input(fmt::format("{}: tensor '{}': '{}' holds it too",
                                   printable(held->path(), 4096), printable(info.name),
                                   printable(position->second.file->path(), 4096)));
  }
  return {};
}

TensorIndex::Ref TensorIndex::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? Ref{} : found->second;
}

std::string_view TensorIndex::absence(std::string_view name) const {
  const auto& unindexed = left_out_.unindexed;
  return std::binary_search(unindexed.begin(), unindexed.end(), name)
             ? "one that model.safetensors.index.json does not name, though a shard holds it"
             : "no such tensor";
}

uint64_t TensorIndex::size_bytes() const {
  uint64_t total = 0;
  for (const auto& file : files_) total += file->size_bytes();
  return total;
}

}  // namespace nvfp4_moe::internal
