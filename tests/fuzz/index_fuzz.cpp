// Bytes as model.safetensors.index.json next to two shards: an accepted index names the shards'
// tensors, each in the file that holds it, and no file of another folder.
#include <cstdint>
#include <string>

#include "fuzz/framed.h"
#include "fuzz/require.h"
#include "fuzz/temporary.h"
#include "safetensors/safetensors.h"

using namespace nvfp4_moe::internal;

namespace {

struct Model {
  fuzz::TemporaryDirectory directory;
  Model() {
    fuzz::write_file(directory.file("a.safetensors"),
                     fuzz::framed(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                                  R"("y":{"dtype":"F32","shape":[],"data_offsets":[4,8]}})",
                                  'a'));
    fuzz::write_file(
        directory.file("b.safetensors"),
        fuzz::framed(R"({"z":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})", 'b'));
    fuzz::write_file(directory.file("broken.safetensors"), "no header");
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Model model;
  fuzz::write_file(model.directory.file("model.safetensors.index.json"),
                   {reinterpret_cast<const char*>(data), size});
  const auto index = TensorIndex::open(model.directory.path());
  if (!index.ok()) {
    REQUIRE(index.status().code() == Code::kBadInput);
    REQUIRE(!index.status().message().empty());
    for (const char c : index.status().message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
    return 0;
  }
  REQUIRE(!index->tensors().empty());
  for (const auto& file : index->files())
    REQUIRE(file->path() == model.directory.file("a.safetensors") ||
            file->path() == model.directory.file("b.safetensors"));
  for (const auto& [name, ref] : index->tensors()) {
    REQUIRE(ref.file->find(name) == ref.info && (name == "x" || name == "y" || name == "z"));
    std::byte first{};
    REQUIRE(ref.file->read(ref.file->offset(*ref.info), &first, 1).ok());
    REQUIRE(first == std::byte(name == "z" ? 'b' : 'a'));
  }
  return 0;
}
