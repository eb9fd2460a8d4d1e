// Options that name a file to write. They are refused before any work if the file cannot be written
// or is an input.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal::cli {

// Another file of the verb: its option, "--input", and its path.
struct NamedFile {
  std::string name;
  std::string path;
};

// Returns the file to write: `path`, or the target of a symbolic link (io/output_file.h lists what
// is refused). It must not be one of `others`, under any name, or a file in the folder `model`.
Result<std::string> checked_output(const std::string& option, const std::string& path,
                                   const std::vector<NamedFile>& others, const std::string& model);

}  // namespace nvfp4_moe::internal::cli
