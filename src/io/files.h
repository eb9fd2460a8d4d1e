// Reading whole text files, and errors of the system that name a file. output_file.h has what
// writes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/printable.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Whether a file that begins with `head` is a Git-LFS pointer: what a clone without Git LFS leaves
// in a large file's place.
bool is_git_lfs_pointer(std::string_view head);
// The error message for that case, with what to do.
Status git_lfs_pointer_status();

// A regular file's whole content; a Git-LFS pointer is refused as such. kIo if the system refuses,
// kBadInput if it is not a regular file or is larger than max_bytes.
Result<std::string> read_text_file(const std::string& path, size_t max_bytes = size_t{100} << 20);

// A regular file's first bytes: as many as it has, and at most max_bytes. Errors as above.
Result<std::string> read_first_bytes(const std::string& path, size_t max_bytes);

// Whether the directory has an entry of this name, be it a link to nothing. kIo if the system does
// not say.
Result<bool> has_entry(const std::string& path);
// The names in a directory, sorted. std::filesystem's iterators would end the process if there is
// no memory for a name (libstdc++ makes paths in functions that may not throw).
Result<std::vector<std::string>> list_directory(const std::string& path);

// "PATH: WHAT: reason of errno". kIo, or kOutOfMemory of ENOMEM.
Status errno_status(const std::string& path, std::string_view what, int error_number);

}  // namespace nvfp4_moe::internal
