// Inputs of a case: weights quantized from near-Gaussian values, hidden by data kind, ids by
// routing.
#include "cases/cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/float_formats.h"
#include "core/quantize.h"

namespace nvfp4_moe::internal {
namespace {

// A separate stream for each part of a case, so that adding a part changes no other.
enum class Stream : uint64_t {
  kWeights = 1,
  kHidden,
  kIds,
  kRouterWeights,
  kSharedWeights,
  kBiases
};
Random stream(const Case& spec, Stream part, int64_t index = 0) {
  Random mixed(spec.seed * 0x100000001B3u + static_cast<uint64_t>(part));
  return Random(mixed.next() ^ Random(static_cast<uint64_t>(index)).next());
}

// gain is the spread of the products' sum relative to the input's: sqrt(cols) terms of variance
// gain^2 / cols. For fp8 every fifth row of every other 16 is faint, so that its weights are
// subnormal in E4M3, and the largest block scale is anywhere in ten octaves, so that shifts of both
// signs occur.
float make_matrix(Random& random, int64_t rows, int64_t cols, double gain, bool fp8,
                  Nvfp4Buffers& out) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  const double spread = gain / std::sqrt(static_cast<double>(cols));
  float amax = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const double row_gain =
        (0.5 + random.uniform()) * (fp8 && r / 16 % 2 == 1 && r % 5 == 2 ? 0x1p-10 : 1.0);
    for (int64_t c = 0; c < cols; ++c) {
      float& value = values[static_cast<size_t>(r * cols + c)];
      value = static_cast<float>(random.normal() * spread * row_gain);
      if (random.below(512) == 0) value *= 8;  // outliers: block scales over several octaves
      amax = std::max(amax, std::fabs(value));
    }
  }
  for (int64_t r = 0; r < rows; r += 13)  // blocks of zeros with a scale byte of 0
    std::fill_n(values.begin() + r * cols, std::min<int64_t>(16, cols), 0.0f);
  // Any positive tensor scale is legal. This one is drawn between amax/2688 and twice that and is
  // not a power of two.
  float scale = tensor_scale_from_amax(amax * (1 + random.uniform()));
  if (fp8) scale = std::ldexp(scale, static_cast<int>(random.below(10)));
  out.codes.resize(static_cast<size_t>(rows * cols / 2));
  out.block_scales.resize(static_cast<size_t>(rows * cols / 16));
  QuantizeCounts counts;
  const Status quantized = quantize_weights(values, rows, cols, scale, ScaleSearch::kMax,
                                            out.codes.data(), out.block_scales.data(), counts);
  return quantized.ok() ? scale : std::numeric_limits<float>::quiet_NaN();
}

TensorScales make_expert(const Case& spec, int64_t expert, int64_t intermediate,
                         ExpertBuffers& out) {
  Random random = stream(spec, Stream::kWeights, expert);
  const int64_t hidden = spec.options.hidden_size;
  const bool fp8 = spec.options.activation_format == ActivationFormat::kFp8;
  TensorScales scales;
  if (has_gate(spec.options.activation))
    scales.gate = make_matrix(random, intermediate, hidden, 1.5, fp8, out.gate);
  scales.up = make_matrix(random, intermediate, hidden, 1.0, fp8, out.up);
  scales.down = make_matrix(random, hidden, intermediate, 1.0, fp8, out.down);
  return scales;
}

// Biases of the size of the sums that they are added to: about 1.5 and 1 of a normal hidden, gate
// and up, 1 for down; one in seven is zero and one in sixteen far larger, so that clamps and
// roundings see both.
void make_biases(const Case& spec, int64_t expert, ExpertBuffers& out) {
  Random random = stream(spec, Stream::kBiases, expert);
  const auto fill = [&random](int64_t count, double spread, std::vector<float>& to) {
    for (int64_t i = 0; i < count; ++i) {
      const double value = random.normal() * spread * (random.below(16) == 0 ? 8 : 1);
      to.push_back(random.below(7) == 0 ? 0.0f : static_cast<float>(value));
    }
  };
  fill(gate_rows(spec.options.activation, spec.options.intermediate_size), 1.5, out.gate_bias);
  fill(spec.options.intermediate_size, 1.0, out.up_bias);
  fill(spec.options.hidden_size, 1.0, out.down_bias);
}

double hidden_value(const Case& spec, Random& random, int64_t token, int64_t channel) {
  const double value = random.normal();
  switch (spec.data) {
    case DataKind::kNormal:
    case DataKind::kNan: return value;
    case DataKind::kOutliers: return channel % 32 == 5 ? 20 * value : value;
    case DataKind::kTiny: return value * 0x1p-20;
    case DataKind::kZeros:
      if (token % 3 == 1) return 0.0;
      return channel / 16 % 4 == token % 4 ? -0.0 : value;
    case DataKind::kSaturating: return value * 64;
    case DataKind::kHuge: return value * 0x1p70;
  }
  return value;
}

void put(std::vector<uint8_t>& bytes, DType dtype, int64_t index, double value) {
  if (dtype == DType::kF32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(bytes.data() + index * 4, &narrow, sizeof(narrow));
    return;
  }
  const uint16_t narrow = dtype == DType::kBf16 ? bf16_from_double(value) : fp16_from_double(value);
  std::memcpy(bytes.data() + index * 2, &narrow, sizeof(narrow));
}

void make_hidden(CaseData& data) {
  const Case& spec = data.spec;
  const int64_t hidden = spec.options.hidden_size;
  data.hidden.resize(static_cast<size_t>(spec.tokens * hidden * bits(spec.hidden_dtype) / 8));
  for (int64_t t = 0; t < spec.tokens; ++t) {
    Random random = stream(spec, Stream::kHidden, t);
    for (int64_t c = 0; c < hidden; ++c)
      put(data.hidden, spec.hidden_dtype, t * hidden + c, hidden_value(spec, random, t, c));
    if (spec.data != DataKind::kNan || t % 3 != 0) continue;
    constexpr double kInf = std::numeric_limits<double>::infinity();
    const double bad = t % 9 == 0 ? std::nan("") : t % 9 == 3 ? kInf : -kInf;
    put(data.hidden, spec.hidden_dtype, t * hidden + random.below(hidden), bad);
  }
}

// top_k distinct experts, by a partial shuffle.
void distinct_experts(Random& random, std::vector<int64_t>& pool, int64_t top_k) {
  for (int64_t k = 0; k < top_k; ++k)
    std::swap(pool[static_cast<size_t>(k)],
              pool[static_cast<size_t>(k + random.below(static_cast<int64_t>(pool.size()) - k))]);
}

int64_t zipf_expert(Random& random, int64_t experts) {
  double total = 0;
  for (int64_t e = 0; e < experts; ++e) total += 1.0 / static_cast<double>(e + 1);
  double left = random.uniform() * total;
  for (int64_t e = 0; e < experts; ++e) {
    left -= 1.0 / static_cast<double>(e + 1);
    if (left < 0) return e;
  }
  return experts - 1;
}

int64_t bad_id(Random& random, const Case& spec) {
  const int64_t experts = spec.options.num_experts;
  const int64_t small[] = {experts, experts + 7, -2, std::numeric_limits<int32_t>::max(),
                           std::numeric_limits<int32_t>::min()};
  const int64_t large[] = {(int64_t{1} << 40) + 1, (int64_t{1} << 32) - 1,
                           std::numeric_limits<int64_t>::min()};
  if (spec.ids_dtype == DType::kI64 && random.below(2) == 0) return large[random.below(3)];
  return small[random.below(5)];
}

void make_ids(CaseData& data) {
  const Case& spec = data.spec;
  const int64_t experts = spec.options.num_experts, top_k = spec.options.top_k;
  data.topk_ids.resize(static_cast<size_t>(spec.tokens * top_k * bits(spec.ids_dtype) / 8));
  std::vector<int64_t> all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), int64_t{0});
  for (int64_t t = 0; t < spec.tokens; ++t) {
    Random random = stream(spec, Stream::kIds, t);
    std::vector<int64_t> pool = all;
    distinct_experts(random, pool, top_k);
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t id = pool[static_cast<size_t>(k)];
      switch (spec.routing) {
        case Routing::kUniform: break;
        case Routing::kZipf: id = zipf_expert(random, experts); break;
        case Routing::kOneExpert: id = k == 0 ? spec.range.first : -1; break;
        case Routing::kEmptyExperts: id -= id % 3; break;
        case Routing::kAllNone: id = -1; break;
        case Routing::kPartlyNone: id = t % 5 == 2 || random.below(4) == 0 ? -1 : id; break;
        case Routing::kDuplicates: id = t % 2 == 0 ? pool[0] : random.below(experts); break;
        case Routing::kBadIds: id = random.below(3) == 0 ? bad_id(random, spec) : id; break;
      }
      data.set_id(t, k, id);
    }
  }
}

void make_weights(CaseData& data) {
  const Case& spec = data.spec;
  for (int64_t t = 0; t < spec.tokens; ++t) {
    Random random = stream(spec, Stream::kRouterWeights, t);
    for (int64_t k = 0; k < spec.options.top_k; ++k) {
      const double weight = random.below(16) == 0 ? 0.0 : (0.05 + 0.95 * random.uniform());
      data.topk_weights.push_back(static_cast<float>(weight * spec.options.max_router_weight));
    }
    if (spec.shared_weights)
      data.shared_weights.push_back(
          static_cast<float>(stream(spec, Stream::kSharedWeights, t).uniform() + 0.25));
  }
}

}  // namespace

const char* to_string(Routing routing) {
  switch (routing) {
    case Routing::kUniform: return "uniform";
    case Routing::kZipf: return "zipf";
    case Routing::kOneExpert: return "one_expert";
    case Routing::kEmptyExperts: return "empty_experts";
    case Routing::kAllNone: return "all_none";
    case Routing::kPartlyNone: return "partly_none";
    case Routing::kDuplicates: return "duplicates";
    case Routing::kBadIds: return "bad_ids";
  }
  return "?";
}

const char* to_string(DataKind data) {
  switch (data) {
    case DataKind::kNormal: return "normal";
    case DataKind::kOutliers: return "outliers";
    case DataKind::kTiny: return "tiny";
    case DataKind::kZeros: return "zeros";
    case DataKind::kSaturating: return "saturating";
    case DataKind::kNan: return "nan";
    case DataKind::kHuge: return "huge";
  }
  return "?";
}

ExpertSource CaseData::expert(int64_t local_expert) const {
  const auto index =
      static_cast<size_t>(local_expert == kSharedExpert ? spec.range.count : local_expert);
  ExpertSource source = source_of(config, experts[index]);
  source.gate.tensor_scale = tensor_scales[index].gate;
  source.up.tensor_scale = tensor_scales[index].up;
  source.down.tensor_scale = tensor_scales[index].down;
  return source;
}

int64_t CaseData::id(int64_t token, int64_t k) const {
  const auto index = static_cast<size_t>(token * spec.options.top_k + k);
  if (spec.ids_dtype == DType::kI64) {
    int64_t id = 0;
    std::memcpy(&id, topk_ids.data() + index * sizeof(id), sizeof(id));
    return id;
  }
  int32_t id = 0;
  std::memcpy(&id, topk_ids.data() + index * sizeof(id), sizeof(id));
  return id;
}

void CaseData::set_id(int64_t token, int64_t k, int64_t id) {
  const auto index = static_cast<size_t>(token * spec.options.top_k + k);
  if (spec.ids_dtype == DType::kI64) {
    std::memcpy(topk_ids.data() + index * sizeof(id), &id, sizeof(id));
  } else {
    const auto narrow = static_cast<int32_t>(id);
    std::memcpy(topk_ids.data() + index * sizeof(narrow), &narrow, sizeof(narrow));
  }
}

Batch CaseData::batch(void* out) const {
  return {.tokens = spec.tokens,
          .hidden = hidden.data(),
          .hidden_dtype = spec.hidden_dtype,
          .topk_ids = topk_ids.data(),
          .ids_dtype = spec.ids_dtype,
          .topk_weights = topk_weights.data(),
          .shared_weights = shared_weights.empty() ? nullptr : shared_weights.data(),
          .out = out,
          .out_dtype = spec.out_dtype};
}

size_t CaseData::out_bytes() const {
  return static_cast<size_t>(spec.tokens * spec.options.hidden_size * bits(spec.out_dtype) / 8);
}

Result<CaseData> make_case(const Case& spec) {
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(spec.options));
  CaseData data{spec, config, {}, {}, {}, {}, {}, {}, {}};
  // Scales that calibration on normal data would find, not powers of two: hidden within +-5, the
  // intermediate within +-12.
  data.scales = {5.0f / 2688.0f, 12.0f / 2688.0f};
  const bool shared = spec.options.shared_intermediate_size > 0;
  data.experts.resize(static_cast<size_t>(spec.range.count + (shared ? 1 : 0)));
  for (int64_t e = 0; e < spec.range.count; ++e)
    data.tensor_scales.push_back(make_expert(spec, spec.range.global(e),
                                             spec.options.intermediate_size,
                                             data.experts[static_cast<size_t>(e)]));
  for (int64_t e = 0; e < spec.range.count && spec.options.expert_biases; ++e)
    make_biases(spec, spec.range.global(e), data.experts[static_cast<size_t>(e)]);
  if (shared)
    data.tensor_scales.push_back(make_expert(spec, spec.options.num_experts,
                                             spec.options.shared_intermediate_size,
                                             data.experts.back()));
  make_hidden(data);
  make_ids(data);
  make_weights(data);
  return data;
}

}  // namespace nvfp4_moe::internal
