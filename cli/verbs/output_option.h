// Options that name a file to write. They are refused before any work if the file cannot be written
// or is an input. Several verbs take --html FILE.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/console/report.h"
#include "core/status.h"

namespace nvfp4_moe::internal::cli {

// Another file of the verb: its option, "--input", and its path.
struct NamedFile {
  std::string name;
  std::string path;
};

// Returns the file to write: `path`, or the target of a symbolic link (io/output_file.h lists what
// is refused). It must not be one of `others`, under any name, or a file of `model`. A model is a
// folder, or one file and the shards and JSON files next to it.
Result<std::string> checked_output(const std::string& option, const std::string& path,
                                   const std::vector<NamedFile>& others, const std::string& model);

// --html FILE, which is empty if it is not given.
void add_html(CLI::App& verb, std::string& path);
// As checked_output, for all `models`; empty if no page is asked for.
Result<std::string> checked_page(const std::string& path, const std::string& input,
                                 const std::vector<std::string>& models);
// Adds the host to the JSON and, if a page is asked for, begins it.
void begin_page(const std::string& checked_path, Report& report);

}  // namespace nvfp4_moe::internal::cli
