// Reads whole text files, and formats system errors that name a file. output_file.h writes files.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/printable.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Whether a file that begins with `head` is a Git-LFS pointer. A clone without Git LFS has one
// instead of a large file.
bool is_git_lfs_pointer(std::string_view head);
// The error message for that case, with what to do.
Status git_lfs_pointer_status();

// Reads a regular file's whole content. A Git-LFS pointer is refused as such. kIo if the system
// refuses, kBadInput if it is not a regular file or is larger than max_bytes.
Result<std::string> read_text_file(const std::string& path, size_t max_bytes = size_t{100} << 20);

// Reads a regular file's first bytes: max_bytes, or fewer if the file is shorter. Errors as above.
Result<std::string> read_first_bytes(const std::string& path, size_t max_bytes);

// Whether the directory has an entry of this name, even a dangling link. kIo if the system does not
// report it.
Result<bool> has_entry(const std::string& path);
// The names in a directory, sorted. This avoids std::filesystem's iterators, which would end the
// process if there is no memory for a name (libstdc++ makes paths in functions that may not throw).
Result<std::vector<std::string>> list_directory(const std::string& path);

// "PATH: WHAT: reason of errno". kIo, or kOutOfMemory of ENOMEM.
Status errno_status(const std::string& path, std::string_view what, int error_number);

}  // namespace nvfp4_moe::internal
