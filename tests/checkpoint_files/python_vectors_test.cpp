// The safetensors package's own file, read and written again; made by
// tests/vectors/make_safetensors_vectors.py.
#include <nlohmann/json.hpp>

#include "safetensors/safetensors.h"
#include "support/read_tensor.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

const std::string kVectors = NVFP4_MOE_SOURCE_DIR "/tests/vectors/safetensors/";

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<int>(byte >> 4)];
    text += "0123456789abcdef"[std::to_integer<int>(byte & std::byte{15})];
  }
  return text;
}

TEST(PythonSafetensors, IsReadAsThePackageMeantIt) {
  const auto file = must(SafetensorsFile::open(kVectors + "python.safetensors"));
  const auto expected = nlohmann::json::parse(read_file(kVectors + "python.expected.json"));
  EXPECT_EQ(nlohmann::json(file->header().metadata), expected["metadata"]);
  ASSERT_EQ(file->header().tensors.size(), expected["tensors"].size());
  for (const auto& tensor : expected["tensors"]) {
    const TensorInfo* info = file->find(tensor["name"].get<std::string>());
    ASSERT_NE(info, nullptr) << tensor["name"];
    EXPECT_EQ(to_string(info->dtype), tensor["dtype"].get<std::string>());
    EXPECT_EQ(info->shape, tensor["shape"].get<std::vector<int64_t>>()) << tensor["name"];
    EXPECT_EQ(hex(read_tensor(*file, *info)), tensor["bytes"].get<std::string>()) << tensor["name"];
  }
}

// The same tensors in the same order give the package's file byte for byte, so the package reads
// what is written here.
TEST(PythonSafetensors, IsWrittenByteForByte) {
  const auto file = must(SafetensorsFile::open(kVectors + "python.safetensors"));
  TempDir dir;
  std::vector<TensorInfo> tensors = file->header().tensors;
  auto writer = must(
      SafetensorsWriter::create(dir.file("copy.safetensors"), tensors, file->header().metadata));
  for (const TensorInfo& info : tensors) ASSERT_OK(writer->write(read_tensor(*file, info)));
  ASSERT_OK(writer->finish());
  EXPECT_EQ(read_file(dir.file("copy.safetensors")), read_file(kVectors + "python.safetensors"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
