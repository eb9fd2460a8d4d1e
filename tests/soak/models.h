// The layers of the soak: how each is opened, and every output that is right.
//
// A model has two versions of local expert 0, which replacements swap, and is otherwise constant.
// So a run must give the bits of one version or of the other. Anything else means a weight half
// written, a shared workspace or freed memory.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "moe/c_layer.h"

namespace nvfp4_moe::internal::test {

inline constexpr int64_t kSoakMaxTokens = 16;
inline constexpr const char* kSoakBackends[] = {"cpu", "reference"};

class SoakModel {
 public:
  static constexpr size_t kVersions = 2;
  using Open = std::function<nvfp4_moe_status(nvfp4_moe_layer_options, nvfp4_moe_layer**)>;
  struct Right {
    std::vector<float> out;  // (T, H)
    uint64_t bad_expert_ids = 0, nonfinite_tokens = 0;
  };

  // Arrays in this process's memory, with these sizes; choose sets the config's other fields.
  SoakModel(const std::string& name, const MoeOptions& options,
            const std::function<void(nvfp4_moe_config&)>& choose = {})
      : name_(name) {
    const auto arrays = std::make_shared<CLayer>(options);
    if (choose) choose(arrays->config);
    open_ = [arrays](nvfp4_moe_layer_options layer_options, nvfp4_moe_layer** layer) {
      layer_options.cache_directory = nullptr;  // the cache is for layers that come from files
      return nvfp4_moe_layer_open_tensors(&arrays->config, &arrays->tensors, &layer_options, layer);
    };
    learn(options, arrays->tiny.experts[0]);
  }
  // The first layer of a checkpoint. Opens that name a cache directory go through the packed cache.
  explicit SoakModel(const std::string& path) : name_("checkpoint") {
    const auto checkpoint = std::make_shared<const nvfp4_moe::Checkpoint>(path);
    open_ = [checkpoint](const nvfp4_moe_layer_options& layer_options, nvfp4_moe_layer** layer) {
      return nvfp4_moe_layer_open_checkpoint(checkpoint->get(), 0, nullptr, &layer_options, layer);
    };
    const nvfp4_moe_config config = checkpoint->config(0);
    auto layer_options = nvfp4_moe::make<nvfp4_moe_layer_options>();
    layer_options.max_tokens = 1;
    const nvfp4_moe::Layer layer(*checkpoint, 0, layer_options);
    std::mt19937 random(1);
    Expert own = Expert::random(config.hidden_size, config.intermediate_size, random);
    nvfp4_moe_expert_out out = buffers(own);
    layer.unpack_expert(0, out);
    own.gate.tensor_scale = out.gate_tensor_scale;
    own.up.tensor_scale = out.up_tensor_scale;
    own.down.tensor_scale = out.down_tensor_scale;
    learn(sizes_of(config.num_experts, config.top_k, config.hidden_size, config.intermediate_size),
          own);
  }

  const std::string& name() const { return name_; }
  nvfp4_moe_status open(const nvfp4_moe_layer_options& options, nvfp4_moe_layer** layer) const {
    return open_(options, layer);
  }
  size_t batches() const { return batches_.size(); }
  // A copy; the caller may write its output.
  TinyBatch batch(size_t index) const { return batches_[index]; }
  const Expert& version(size_t index) const { return versions_[index]; }
  const Right& right(size_t backend, size_t batch, size_t version) const {
    return right_[(backend * batches_.size() + batch) * kVersions + version];
  }
  // The version that gives this output; kVersions if neither does.
  size_t version_of(size_t backend, size_t batch, const std::vector<float>& out) const {
    size_t version = 0;
    while (version < kVersions && !same_bits(out, right(backend, batch, version).out)) ++version;
    return version;
  }
  // The version that all these codes and scales belong to; kVersions if they are mixed.
  size_t version_of(const nvfp4_moe_expert_out& out) const {
    const auto same = [](const Matrix& matrix, const uint8_t* codes, const uint8_t* scales,
                         float tensor_scale) {
      return std::equal(matrix.codes.begin(), matrix.codes.end(), codes) &&
             std::equal(matrix.block_scales.begin(), matrix.block_scales.end(), scales) &&
             matrix.tensor_scale == tensor_scale;
    };
    size_t version = 0;
    for (; version < kVersions; ++version) {
      const Expert& e = versions_[version];
      if (same(e.gate, out.gate_codes, out.gate_block_scales, out.gate_tensor_scale) &&
          same(e.up, out.up_codes, out.up_block_scales, out.up_tensor_scale) &&
          same(e.down, out.down_codes, out.down_block_scales, out.down_tensor_scale))
        break;
    }
    return version;
  }
  // Arrays for nvfp4_moe_layer_unpack_expert of local expert 0, kept in `expert`.
  static nvfp4_moe_expert_out buffers(Expert& expert) {
    auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
    out.gate_codes = expert.gate.codes.data();
    out.gate_block_scales = expert.gate.block_scales.data();
    out.up_codes = expert.up.codes.data();
    out.up_block_scales = expert.up.block_scales.data();
    out.down_codes = expert.down.codes.data();
    out.down_block_scales = expert.down.block_scales.data();
    return out;
  }

 private:
  // Makes the versions, the batches and the right outputs, from a layer that no other thread uses.
  void learn(const MoeOptions& options, const Expert& own) {
    versions_ = {own, own};
    Expert& altered = versions_[1];  // differs in every code and scale
    for (Matrix* matrix : {&altered.gate, &altered.up, &altered.down}) {
      for (uint8_t& byte : matrix->codes) byte ^= 0x11;
      matrix->tensor_scale *= 2;
    }
    uint32_t seed = 1;
    for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{5}, kSoakMaxTokens, int64_t{9}})
      batches_.emplace_back(options, tokens, seed++);
    batches_.back().ids[0] = 9999;
    batches_.back().hidden[static_cast<size_t>(options.hidden_size)] =
        bf16_from_float(std::numeric_limits<float>::quiet_NaN());
    for (const char* backend : kSoakBackends) {
      auto layer_options = nvfp4_moe::make<nvfp4_moe_layer_options>();
      layer_options.backend = backend;
      layer_options.max_tokens = kSoakMaxTokens;
      layer_options.threads = 1;
      nvfp4_moe_layer* layer = nullptr;
      nvfp4_moe::check(open_(layer_options, &layer));
      const std::unique_ptr<nvfp4_moe_layer, decltype(&nvfp4_moe_layer_close)> owned(
          layer, nvfp4_moe_layer_close);
      size_t bytes = 0;
      nvfp4_moe::check(nvfp4_moe_layer_workspace_bytes(layer, kSoakMaxTokens, &bytes));
      const nvfp4_moe::Workspace workspace(bytes);
      for (TinyBatch batch : batches_)
        for (const Expert& version : versions_) {
          const nvfp4_moe_expert expert = CLayer::expert(version);
          nvfp4_moe::check(nvfp4_moe_layer_replace_expert(layer, 0, &expert));
          const nvfp4_moe_batch c = c_batch(batch);
          nvfp4_moe::check(
              nvfp4_moe_layer_run(layer, &c, workspace.data(), workspace.size_bytes(), nullptr));
          auto status = nvfp4_moe::make<nvfp4_moe_run_status>();
          nvfp4_moe::check(
              nvfp4_moe_layer_run_status(layer, workspace.data(), workspace.size_bytes(), &status));
          right_.push_back({batch.out, status.bad_expert_ids, status.nonfinite_tokens});
        }
    }
  }

  std::string name_;
  Open open_;
  std::vector<Expert> versions_;    // (kVersions)
  std::vector<TinyBatch> batches_;  // the last has a bad id and a token that is not finite
  std::vector<Right> right_;        // (backend, batch, version)
};

}  // namespace nvfp4_moe::internal::test
