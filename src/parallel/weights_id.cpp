
#include <algorithm>
#include <array>
#include <set>

#include "backend/backend.h"
#include "io/content_hash.h"
#include "parallel/open.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint64_t kSampleBytes = 512;

// Hashes bytes from the middle of the tensor or, if it is a stack of all experts, of this expert's
// part.
Status add_sample(const TensorIndex::Ref& tensor, int64_t expert, int64_t experts,
                  ContentHasher& hasher) {
  const TensorInfo& info = *tensor.info;
  hasher.text(describe(info));
  const bool stacked = expert >= 0 && info.shape.size() == 3 && info.shape[0] == experts;
  const uint64_t size =
      stacked ? info.size_bytes() / static_cast<uint64_t>(experts) : info.size_bytes();
  const uint64_t first = stacked ? size * static_cast<uint64_t>(expert) : 0;
  std::array<std::byte, kSampleBytes> sample;
  const uint64_t count = std::min(size, kSampleBytes);
  NVFP4_MOE_TRY(tensor.file->read(tensor.file->offset(info) + first + (size - count) / 2,
                                  sample.data(), static_cast<size_t>(count)));
  hasher.bytes(sample.data(), static_cast<size_t>(count));
  return {};
}

}  // namespace

Result<std::string> weights_id(const Checkpoint& checkpoint, int64_t layer) {
  NVFP4_MOE_ASSIGN(const MoeOptions options, checkpoint.layer_options(layer));
  const ModelInfo& model = checkpoint.model();
  ContentHasher hasher;
  hasher.text(model.model_type);
  hasher.text(to_string(model.format));
  hasher.text(model.quant_method);
  hasher.text(model.quant_algo);
  if (!model.read_as.empty()) hasher.text("as " + model.read_as);
  const auto& order = checkpoint.options().gate_up_order;
  hasher.text(order ? to_string(*order) : "");
  std::set<int64_t> experts{0, options.num_experts / 2, options.num_experts - 1};
  if (options.shared_intermediate_size > 0) experts.insert(kSharedExpert);
  constexpr std::array kProjections = {"gate", "up", "down"};
  const auto& tensors = checkpoint.index().tensors();
  for (const int64_t expert : experts) {
    // prefixes of the expert's tensors: "...experts.7.up_proj.", or "...experts." if stacked
    std::set<std::string> modules;
    for (size_t p = static_cast<size_t>(first_matrix(options.activation)); p < kProjections.size();
         ++p) {
      const std::string name = checkpoint.tensor_name(layer, expert, kProjections[p]);
      modules.insert(name.substr(0, name.rfind('.') + 1));
    }
    for (const std::string& module : modules)
      for (auto at = tensors.lower_bound(module);
           at != tensors.end() && at->first.starts_with(module); ++at) {
        hasher.text(at->first);
        NVFP4_MOE_TRY(add_sample(at->second, expert, options.num_experts, hasher));
      }
  }
  return to_string(hasher.digest());
}

}  // namespace nvfp4_moe::internal
