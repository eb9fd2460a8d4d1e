#include "cli/verbs/output_option.h"

#include <fmt/format.h>

#include <filesystem>

#include "io/files.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal::cli {

Result<std::string> checked_output(const std::string& option, const std::string& path,
                                   const std::vector<NamedFile>& others, const std::string& model) {
  auto target = output_path(path);
  if (!target.ok()) return target.status().in(option);
  const auto refuse = [&](const std::string& name, const std::string& other) {
    return invalid_argument(
        fmt::format("{} {}: expected another file than {} {}, which it would overwrite", option,
                    nvfp4_moe::internal::printable(path, 4096), name,
                    nvfp4_moe::internal::printable(other, 4096)));
  };
  for (const NamedFile& other : others) {
    if (!other.path.empty() && same_file(*target, other.path))
      return refuse(other.name, other.path);
  }
  // If the model's folder cannot be listed, opening the model will report why.
  const Result<std::vector<std::string>> names = list_directory(model);
  if (!names.ok()) return names.status().code() == Code::kOutOfMemory ? names.status() : target;
  for (const std::string& name : *names) {
    const std::string file = (std::filesystem::path(model) / name).string();
    if (same_file(*target, file)) return refuse("the model's", file);
  }
  return target;
}

}  // namespace nvfp4_moe::internal::cli
