// Bytes as a safetensors file: header parse, the properties of accepted headers, and a walk over
// the file's tensors.
//
// An input that begins with '{' is header text: the length is put in front and data appended up to
// the last offset that it names (up to a limit), so that the fuzzer need not find those numbers.
// Any other input is the whole file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "fuzz/framed.h"
#include "fuzz/require.h"
#include "safetensors/plan.h"
#include "safetensors/safetensors.h"
#include "safetensors/shape.h"

using namespace nvfp4_moe::internal;

namespace {

void check_status(const Status& status) {
  REQUIRE(status.code() == Code::kBadInput);
  REQUIRE(!status.message().empty());
  for (const char c : status.message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
}

void check_header(const SafetensorsHeader& header, uint64_t file_size) {
  uint64_t covered = 0;
  for (const TensorInfo& info : header.tensors) {
    REQUIRE(info.begin == covered && info.end >= info.begin);
    covered = info.end;
    const Result<uint64_t> bytes = tensor_bytes(info.dtype, info.shape);
    REQUIRE(bytes.ok() && *bytes == info.size_bytes());
    REQUIRE(!describe(info).empty());
  }
  REQUIRE(header.data_offset + covered == file_size);

  // A header that was read can be written: the same tensors in the same order when read again.
  std::vector<TensorInfo> tensors = header.tensors;
  REQUIRE(assign_offsets(tensors).ok());
  const Result<std::string> written = header_bytes(tensors, header.metadata);
  REQUIRE(written.ok() && written->size() % 8 == 0);
  const auto again =
      parse_safetensors_header(std::as_bytes(std::span(*written)), written->size() + covered);
  REQUIRE(again.ok() && again->tensors.size() == header.tensors.size() &&
          again->metadata == header.metadata);
  for (const TensorInfo& info : again->tensors) {
    // tensors without bytes may change places with others that begin at the same offset
    bool found = false;
    for (const TensorInfo& before : header.tensors)
      found |= before.name == info.name && before.dtype == info.dtype &&
               before.shape == info.shape && before.begin == info.begin;
    REQUIRE(found);
    if (header.tensors.size() > 64) break;
  }
}

// The file: every tensor is found by name, may be prefetched, and is read to its last byte.
void walk_file(const std::string& bytes) {
  const int fd = memfd_create("safetensors_fuzz", MFD_CLOEXEC);
  REQUIRE(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  const auto file = SafetensorsFile::open("/proc/self/fd/" + std::to_string(fd));
  close(fd);
  REQUIRE(file.ok());
  for (const TensorInfo& info : file->header().tensors) {
    REQUIRE(file->find(info.name) == &info);
    const uint64_t offset = file->offset(info);
    file->prefetch(offset, info.size_bytes());
    std::string read(info.size_bytes(), '\0');
    REQUIRE(file->read(offset, read.data(), read.size()).ok());
    REQUIRE(bytes.compare(offset, read.size(), read) == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  uint64_t file_size = size;
  if (size > 0 && bytes[0] == '{') {
    bytes = fuzz::framed(bytes, '\5');
    file_size = bytes.size();
  }
  const auto header = parse_safetensors_header(std::as_bytes(std::span(bytes)), file_size);
  if (!header.ok()) {
    check_status(header.status());
    return 0;
  }
  check_header(*header, file_size);
  walk_file(bytes);
  return 0;
}
