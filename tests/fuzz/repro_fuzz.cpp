// Bytes as a repro file: read, run on the reference and on the CPU backend, and compared. An
// invalid file gives a Status, a valid one runs.
//
// An input that begins with '{' is header text (fuzz/framed.h). Any other input is the whole file.
#include <cstdint>
#include <string>

#include "fuzz/framed.h"
#include "fuzz/require.h"
#include "fuzz/temporary.h"
#include "moe/repro.h"

using namespace nvfp4_moe::internal;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::TemporaryDirectory directory;
  static const std::string path = directory.file("call.safetensors");
  std::string bytes(reinterpret_cast<const char*>(data), size);
  if (size > 0 && bytes[0] == '{') bytes = fuzz::framed(bytes, '\0');
  fuzz::write_file(path, bytes);
  const auto report = replay(path, "auto", &serial_executor());
  if (report.ok()) {
    REQUIRE(report->tokens >= 1 && !report->backend.empty() && !report->describe.empty());
    REQUIRE(report->same_bits.has_value() == report->with_output.has_value());
    return 0;
  }
  const Code code = report.status().code();
  REQUIRE(code == Code::kBadInput || code == Code::kUnsupported || code == Code::kInvalidArgument);
  REQUIRE(!report.status().message().empty());
  for (const char c : report.status().message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
  return 0;
}
