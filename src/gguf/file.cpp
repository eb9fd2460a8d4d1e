// Opens a GGUF file: reads and checks the header, and nothing after it.
#include <fmt/format.h>

#include <algorithm>

#include "gguf/gguf.h"
#include "io/files.h"
#include "safetensors/shape.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint64_t kFirstBytes = uint64_t{1} << 20;  // enough for a header without a vocabulary

}  // namespace

Result<GgufFile> GgufFile::open(const std::string& path) {
  GgufFile file;
  NVFP4_MOE_TRY(file.open_descriptor(path));
  const std::string shown = printable(path, 4096);
  // Only the header itself determines its length. It is read again with twice the size until it is
  // complete.
  std::vector<std::byte> head;
  for (uint64_t size = kFirstBytes;; size *= 2) {
    const size_t before = head.size();
    head.resize(static_cast<size_t>(std::min({size, file.size_bytes(), kMaxHeaderBytes})));
    NVFP4_MOE_TRY(file.read(before, head.data() + before, head.size() - before));
    if (is_git_lfs_pointer({reinterpret_cast<const char*>(head.data()), head.size()}))
      return git_lfs_pointer_status().in(shown);
    bool more_needed = false;
    Result<GgufHeader> header = parse_gguf_header(head, file.size_bytes(), &more_needed);
    if (header.ok()) {
      file.header_ = std::move(*header);
      file.index_names();
      return file;
    }
    if (!more_needed) return header.status().in(shown);
    if (head.size() >= kMaxHeaderBytes)
      return bad_input(
          fmt::format("{}: header: expected at most {} bytes, got more", shown, kMaxHeaderBytes));
  }
}

}  // namespace nvfp4_moe::internal
