// Options that name a file to write: refused before any work if the file cannot be written, or is
// an input.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal::cli {

// Another file of the verb: "--input", and its path.
struct NamedFile {
  std::string name;
  std::string path;
};

// Where the option's bytes go: `path`, or where it leads as a symbolic link (io/output_file.h says
// what is refused). No file of `others` may be the same one, by whatever name, and none that lies
// in the folder `model`.
Result<std::string> checked_output(const std::string& option, const std::string& path,
                                   const std::vector<NamedFile>& others, const std::string& model);

}  // namespace nvfp4_moe::internal::cli
