#include "cli/verbs/output_option.h"

#include <fmt/format.h>

#include <filesystem>

#include "cli/bench/host.h"
#include "cli/verbs/shared_options.h"
#include "io/files.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal::cli {
namespace {

namespace fs = std::filesystem;

// Whether a file next to a model of one file may be a part of it: its config, or another shard.
bool may_be_of_model(const std::string& name) {
  return name.ends_with(".json") || name.ends_with(".safetensors") || name.ends_with(".gguf");
}

}  // namespace

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
  std::error_code error;
  const bool one_file = fs::is_regular_file(model, error);
  if (one_file && same_file(*target, model)) return refuse("the model's", model);
  const fs::path folder = one_file ? fs::path(model).parent_path() : fs::path(model);
  // If the model cannot be listed, opening it will report why.
  const Result<std::vector<std::string>> names =
      list_directory(one_file && folder.empty() ? "." : folder.string());
  if (!names.ok()) return names.status().code() == Code::kOutOfMemory ? names.status() : target;
  for (const std::string& name : *names) {
    const std::string file = (folder / name).string();
    if ((!one_file || may_be_of_model(name)) && same_file(*target, file))
      return refuse("the model's", file);
  }
  return target;
}

void add_html(CLI::App& verb, std::string& path) {
  verb.add_option("--html", path, "Write the report to FILE too, as one HTML page with pictures")
      ->type_name(kFile);
}

Result<std::string> checked_page(const std::string& path, const std::string& input,
                                 const std::vector<std::string>& models) {
  std::string target;
  if (path.empty()) return target;
  for (const std::string& model : models) {
    NVFP4_MOE_ASSIGN(target, checked_output("--html", path, {{"--input", input}}, model));
  }
  return target;
}

void begin_page(const std::string& checked_path, Report& report) {
  const HostFacts host = read_host();
  report.json()["host"] = {{"cpu", host.cpu}, {"available_threads", host.threads}};
  if (checked_path.empty()) return;
  report.begin_page(checked_path, [checked_path](const std::string& text) {
    return write_text_file(checked_path, text);
  });
}

}  // namespace nvfp4_moe::internal::cli
