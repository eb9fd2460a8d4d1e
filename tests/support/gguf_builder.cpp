#include "support/gguf_builder.h"

#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>

namespace nvfp4_moe::internal::test {

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

std::string le32(uint32_t value) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
  return out;
}

std::string le64(uint64_t value) {
  return le32(static_cast<uint32_t>(value)) + le32(static_cast<uint32_t>(value >> 32));
}

std::string gguf_text(const std::string& text) { return le64(text.size()) + text; }

GgufBuilder& GgufBuilder::raw(const std::string& key, uint32_t type, const std::string& bytes) {
  ++pairs_;
  pair_bytes_ += gguf_text(key) + le32(type) + bytes;
  return *this;
}

GgufBuilder& GgufBuilder::number(const std::string& key, uint32_t value) {
  return raw(key, 4, le32(value));
}

GgufBuilder& GgufBuilder::real(const std::string& key, float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return raw(key, 6, le32(bits));
}

GgufBuilder& GgufBuilder::text(const std::string& key, const std::string& value) {
  return raw(key, 8, gguf_text(value));
}

GgufBuilder& GgufBuilder::tensor(const std::string& name, const std::vector<uint64_t>& shape,
                                 uint32_t type, const std::string& bytes) {
  tensors_.push_back({name, shape, type, bytes});
  return *this;
}

std::string GgufBuilder::header() const {
  std::string out = magic + le32(version) +
                    le64(tensors_.size() + static_cast<uint64_t>(more_tensors)) +
                    le64(pairs_ + static_cast<uint64_t>(more_pairs)) + pair_bytes_;
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors_) {
    out += gguf_text(tensor.name) + le32(static_cast<uint32_t>(tensor.shape.size()));
    for (size_t d = tensor.shape.size(); d > 0; --d) out += le64(tensor.shape[d - 1]);
    out +=
        le32(tensor.type) + le64(tensor.offset < 0 ? offset : static_cast<uint64_t>(tensor.offset));
    offset += (tensor.bytes.size() + alignment - 1) / alignment * alignment;
  }
  return out;
}

std::string GgufBuilder::bytes() const {
  std::string out = header();
  const auto pad = [&] { out.resize((out.size() + alignment - 1) / alignment * alignment); };
  pad();
  for (const Tensor& tensor : tensors_) {
    out += tensor.bytes;
    pad();
  }
  return out;
}

GgufBuilder gguf_model(const GgufModelOptions& options) {
  std::mt19937_64 random(options.seed);
  const auto u64 = [](int64_t value) { return static_cast<uint64_t>(value); };
  const auto u32 = [](int64_t value) { return static_cast<uint32_t>(value); };
  const bool nvfp4 = options.type == GgufBuilder::kNvfp4;
  const size_t block_elems = nvfp4 ? 64 : 32;
  const size_t block_bytes = nvfp4 ? 36 : 17;
  const size_t block_scales = nvfp4 ? 4 : 1;
  GgufBuilder out;
  out.text("general.architecture", "qwen3moe")
      .number("qwen3moe.block_count", u32(options.layers))
      .number("qwen3moe.embedding_length", u32(options.hidden))
      .number("qwen3moe.expert_feed_forward_length", u32(options.intermediate))
      .number("qwen3moe.expert_count", u32(options.experts))
      .number("qwen3moe.expert_used_count", 2);
  const auto scalars = [&](float low) {
    std::string bytes;
    for (int64_t e = 0; e < options.experts; ++e) {
      const float value = low * static_cast<float>(1 + random() % 7);
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    return bytes;
  };
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    for (const char* projection : {"gate", "up", "down"}) {
      const bool down = projection == std::string("down");
      const uint64_t rows = u64(down ? options.hidden : options.intermediate);
      const uint64_t cols = u64(down ? options.intermediate : options.hidden);
      std::string bytes(u64(options.experts) * rows * cols / block_elems * block_bytes, '\0');
      for (size_t i = 0; i < bytes.size(); ++i) {
        const bool scale = i % block_bytes < block_scales;
        bytes[i] = static_cast<char>(!scale  ? random()
                                     : nvfp4 ? 1 + random() % 0x7E
                                             : 110 + random() % 18);
      }
      const std::string stem = "blk." + std::to_string(layer) + ".ffn_" + projection + "_exps.";
      out.tensor(stem + "weight", {u64(options.experts), rows, cols}, options.type, bytes);
      if (!nvfp4 || !options.scales) continue;
      out.tensor(stem + "scale", {u64(options.experts)}, GgufBuilder::kF32, scalars(1e-4f));
      out.tensor(stem + "input_scale", {u64(options.experts)}, GgufBuilder::kF32, scalars(1e-3f));
    }
  }
  return out;
}

}  // namespace nvfp4_moe::internal::test
