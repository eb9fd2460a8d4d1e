// The possible contents of a folder after a power loss: every state that a file system may leave
// between two syncs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "durability/recorded_calls.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// Every file's content by relative path; a folder's path ends with "/" and has none.
using Image = Files;
Image read_image(const std::filesystem::path& folder);
void write_image(const Image& image, const std::filesystem::path& folder);

// The folder as `calls` leave it, with nothing lost: equal to read_image() where the record misses
// no call.
Image image_of_all(const Image& before, const std::vector<RecordedCall>& calls);

// The images of a crash behind the first `count` calls. A file's bytes may be lost from its last
// sync on: all of them, or replaced by zeros. Names may be lost from their folder's last sync on:
// all of them, none, or any of them. First comes the image that lost nothing, then the one that
// lost all that it could.
std::vector<Image> crash_images(const Image& before, const std::vector<RecordedCall>& calls,
                                size_t count);

}  // namespace nvfp4_moe::internal::test
