// GGUF files byte by byte, right or wrong on request. Shares nothing with src/gguf but the format's
// own numbers.
//
//   GgufBuilder builder;
//   builder.text("general.architecture", "qwen3moe").number("qwen3moe.expert_count", 8);
//   builder.tensor("blk.0.ffn_up_exps.weight", {8, 64, 128}, 40, blocks);
//   write_file(dir.file("model.gguf"), builder.bytes());
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::test {

class GgufBuilder {
 public:
  static constexpr uint32_t kF32 = 0, kMxfp4 = 39, kNvfp4 = 40;  // types of ggml

  GgufBuilder& number(const std::string& key, uint32_t value);
  GgufBuilder& real(const std::string& key, float value);
  GgufBuilder& text(const std::string& key, const std::string& value);
  // A raw pair: its type, followed by these bytes.
  GgufBuilder& raw(const std::string& key, uint32_t type, const std::string& bytes);
  // shape: rows first, as everywhere here; the file has the reverse order.
  GgufBuilder& tensor(const std::string& name, const std::vector<uint64_t>& shape, uint32_t type,
                      const std::string& bytes);

  struct Tensor {
    std::string name;
    std::vector<uint64_t> shape;
    uint32_t type = 0;
    std::string bytes;
    int64_t offset = -1;  // -1: the data's real offset
  };
  std::vector<Tensor>& tensors() { return tensors_; }

  // Other fields of the file: edits make a wrong one.
  std::string magic = "GGUF";
  uint32_t version = 3;
  int64_t more_tensors = 0;  // counted but missing
  int64_t more_pairs = 0;
  uint64_t alignment = 32;  // of the data; the caller adds the pair general.alignment

  std::string header() const;  // up to the end of the tensors' descriptions
  std::string bytes() const;

 private:
  uint64_t pairs_ = 0;
  std::string pair_bytes_;
  std::vector<Tensor> tensors_;
};

void write_file(const std::string& path, const std::string& bytes);
std::string le32(uint32_t value);
std::string le64(uint64_t value);
std::string gguf_text(const std::string& text);  // its length, then itself

struct GgufModelOptions {
  uint32_t type = GgufBuilder::kNvfp4;  // or kMxfp4
  int64_t experts = 4, hidden = 128, intermediate = 64, layers = 2;
  bool scales = true;  // NVFP4: with tensor and input scales
  uint64_t seed = 1;
};
// A model of the architecture qwen3moe with random codes and legal scales, gate and up in separate
// tensors.
GgufBuilder gguf_model(const GgufModelOptions& options = {});

}  // namespace nvfp4_moe::internal::test
