#include "convert/checkpoint_copy.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "io/files.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal {

namespace fs = std::filesystem;

namespace {

bool contains(const fs::path& outer, const fs::path& inner) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

// Weights in any format would contradict the new ones, or double the directory's size.
bool is_weights(const std::string& name) {
  constexpr const char* kWeights[] = {".safetensors", ".bin",     ".pt",   ".pth",       ".gguf",
                                      ".h5",          ".msgpack", ".onnx", ".index.json"};
  return std::any_of(std::begin(kWeights), std::end(kWeights),
                     [&](const char* end) { return name.ends_with(end); });
}

// The caller rewrites these two. Files of the same names in subfolders are ordinary files.
bool is_config(const fs::path& relative) {
  return relative == "config.json" || relative == "hf_quant_config.json";
}

// Walks a model's folder.
struct OtherFiles {
  const fs::path root;  // canonical
  std::vector<fs::path>
      around;  // the folders that are being walked, canonical: a link to one of them would not end
  std::vector<OtherFile> files;

  bool is_inside(const fs::path& target) const {
    if (contains(root, target)) return true;
    const fs::path snapshots = root.parent_path();
    return snapshots.filename() == "snapshots" &&
           contains(snapshots.parent_path() / "blobs", target);
  }

  // `path` is the name in the model, `real` the same without links. A folder that cannot be listed
  // is an error, since its files would be missing from the copy unnoticed.
  Status folder(const fs::path& path, const fs::path& real) {
    around.push_back(real);
    NVFP4_MOE_ASSIGN(const std::vector<std::string> names, list_directory(real.string()));
    for (const std::string& name : names) NVFP4_MOE_TRY(entry(path / name, real / name));
    around.pop_back();
    return {};
  }

  Status entry(const fs::path& path, const fs::path& named) {
    const std::string name = path.filename().string();
    if (name.starts_with('.') || is_weights(name)) return {};
    const std::string shown = printable(path.string(), 4096);
    fs::path real = named;
    struct stat facts {};
    if (::lstat(named.c_str(), &facts) != 0)
      return errno_status(path.string(), "cannot stat", errno);
    if (S_ISLNK(facts.st_mode)) {
      std::error_code error;
      real = fs::canonical(named, error);
      if (error == std::errc::not_enough_memory)
        return errno_status(named.string(), "cannot resolve", ENOMEM);
      if (error)
        return bad_input(shown + ": a symbolic link that leads nowhere: " + error.message());
      if (!is_inside(real))
        return bad_input(shown + ": a symbolic link out of the model, to " +
                         printable(real.string(), 4096) +
                         ": expected one that stays inside; replace it by the file, or remove it");
      if (std::find(around.begin(), around.end(), real) != around.end())
        return bad_input(shown + ": a symbolic link to a folder around itself, " +
                         printable(real.string(), 4096));
      if (::stat(real.c_str(), &facts) != 0)
        return errno_status(path.string(), "cannot stat", errno);
    }
    if (S_ISDIR(facts.st_mode)) return folder(path, real);
    // Reads one byte, so that an unreadable file is refused now and not after hours of quantizing.
    if (const Status readable = read_first_bytes(real.string(), 1).status(); !readable.ok())
      return real == path ? readable : readable.in(shown);
    const fs::path relative = path.lexically_relative(root);
    if (!is_config(relative)) files.push_back({relative.string(), real.string()});
    return {};
  }
};

}  // namespace

Status check_apart(const std::string& in, const std::string& out) {
  std::error_code in_error, out_error;
  const fs::path a = fs::weakly_canonical(in, in_error), b = fs::weakly_canonical(out, out_error);
  if (in_error) return errno_status(in, "cannot resolve", in_error.value());
  if (out_error) return errno_status(out, "cannot resolve", out_error.value());
  if (contains(a, b) || contains(b, a))
    return invalid_argument(out + ": expected a directory apart from the source " + in);
  return {};
}

Status copy_tensor(const TensorIndex::Ref& from, ShardedWriter& writer) {
  constexpr uint64_t kBytesAtOnce = 16ull << 20;
  const uint64_t size = from.info->size_bytes();
  std::vector<std::byte> bytes(static_cast<size_t>(std::min(kBytesAtOnce, size)));
  for (uint64_t at = 0; at < size; at += kBytesAtOnce) {
    const auto count = static_cast<size_t>(std::min(kBytesAtOnce, size - at));
    NVFP4_MOE_TRY(from.file->read(from.file->offset(*from.info) + at, bytes.data(), count));
    NVFP4_MOE_TRY(writer.write(from.info->name, {bytes.data(), count}));
  }
  return from.file->check_unchanged();
}

Result<std::vector<OtherFile>> other_files(const std::string& in) {
  std::error_code error;
  const fs::path root = fs::canonical(in, error);
  if (error) return errno_status(in, "cannot be read", error.value());
  OtherFiles walk{root, {}, {}};
  NVFP4_MOE_TRY(walk.folder(root, root));
  std::sort(walk.files.begin(), walk.files.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return walk.files;
}

Result<std::vector<std::string>> copy_other_files(const std::vector<OtherFile>& files,
                                                  const std::string& out) {
  std::vector<std::string> copied;
  for (const OtherFile& file : files) {
    const fs::path target = fs::path(out) / file.name;
    NVFP4_MOE_TRY(make_directories(target.parent_path().string()));
    NVFP4_MOE_TRY(copy_file(file.from, target.string()));
    copied.push_back(file.name);
  }
  return copied;
}

}  // namespace nvfp4_moe::internal
