// The possible contents of a folder after a power loss: every state that a file system may leave
// between two syncs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "durability/recorded_calls.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// Every file's content by relative path; a folder's path ends with "/" and has no content.
using Image = Files;
Image read_image(const std::filesystem::path& folder);
void write_image(const Image& image, const std::filesystem::path& folder);

// The folder after all `calls`, with nothing lost: equal to read_image() if the record is complete.
Image image_of_all(const Image& before, const std::vector<RecordedCall>& calls);

// The images after a crash that follows the first `count` calls. A file's bytes since its last sync
// may be lost: all of them, or replaced by zeros. Names since their folder's last sync may be lost:
// all of them, none, or any of them. The first image lost nothing, the second one lost all that it
// could.
std::vector<Image> crash_images(const Image& before, const std::vector<RecordedCall>& calls,
                                size_t count);

}  // namespace nvfp4_moe::internal::test
