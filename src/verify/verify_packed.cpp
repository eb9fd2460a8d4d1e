#include "verify/verify_packed.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

struct Matrix {
  const char* projection;
  const Nvfp4View& file;
  const Nvfp4Buffers& packed;
  float packed_scale;
};

// Counts differing bytes of two rows. Sets `first` to the first one's position.
uint64_t differing(const uint8_t* a, const uint8_t* b, int64_t count, int64_t& first) {
  first = -1;
  if (std::memcmp(a, b, static_cast<size_t>(count)) == 0) return 0;
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (a[i] == b[i]) continue;
    if (first < 0) first = i;
    ++total;
  }
  return total;
}

std::string code_text(uint8_t code) {
  return fmt::format("0x{:X} ({})", code, e2m1_to_float(code));
}
std::string scale_text(uint8_t byte) {
  return fmt::format("0x{:02X} ({})", byte, e4m3_to_float(byte));
}

void compare(const Matrix& m, WeightFault fault, PackedCheck& out) {
  const int64_t code_bytes = m.file.cols / 2, scale_bytes = m.file.cols / kBlockElems;
  uint64_t differences = 0;
  bool found = false;
  fault.projection = m.projection;
  for (int64_t r = 0; r < m.file.rows; ++r) {
    int64_t code_at = -1, scale_at = -1;
    const uint8_t* codes = m.packed.codes.data() + r * code_bytes;
    const uint8_t* scales = m.packed.block_scales.data() + r * scale_bytes;
    differences += differing(m.file.row_codes(r), codes, code_bytes, code_at);
    differences += differing(m.file.row_scales(r), scales, scale_bytes, scale_at);
    if (found || (code_at < 0 && scale_at < 0)) continue;
    found = true;
    fault.row = r;
    if (code_at >= 0 && (scale_at < 0 || code_at * 2 < scale_at * kBlockElems)) {
      const uint8_t expected = m.file.row_codes(r)[code_at], actual = codes[code_at];
      const bool low = low_code(expected) != low_code(actual);
      fault.what = "code";
      fault.col = code_at * 2 + (low ? 0 : 1);
      fault.expected = code_text(low ? low_code(expected) : high_code(expected));
      fault.actual = code_text(low ? low_code(actual) : high_code(actual));
    } else {
      fault.what = "block_scale";
      fault.col = scale_at * kBlockElems;
      fault.expected = scale_text(m.file.row_scales(r)[scale_at]);
      fault.actual = scale_text(scales[scale_at]);
    }
  }
  if (m.file.tensor_scale != m.packed_scale) {
    differences += sizeof(float);
    if (!found) {
      found = true;
      fault.what = "tensor_scale";
      fault.expected = fmt::format("{}", m.file.tensor_scale);
      fault.actual = fmt::format("{}", m.packed_scale);
    }
  }
  out.bytes_compared +=
      static_cast<uint64_t>(m.file.rows * (code_bytes + scale_bytes)) + sizeof(float);
  out.differing_bytes += differences;
  if (!found) return;
  ++out.faulty_tensors;
  if (out.faults.size() < kMaxFaults) out.faults.push_back(std::move(fault));
}

// Compares the bytes of a bias with those that the layer kept.
void compare_bias(const float* file, const std::vector<float>& packed, int64_t count,
                  WeightFault fault, PackedCheck& out) {
  if (file == nullptr) return;
  const auto same = [&](int64_t i) {
    return static_cast<size_t>(i) < packed.size() &&
           std::memcmp(file + i, &packed[static_cast<size_t>(i)], 4) == 0;
  };
  int64_t first = -1;
  out.bytes_compared += static_cast<uint64_t>(count) * sizeof(float);
  for (int64_t i = count - 1; i >= 0; --i) {
    if (same(i)) continue;
    first = i;
    out.differing_bytes += sizeof(float);
  }
  if (first < 0) return;
  fault.what = "bias";
  fault.row = first;
  fault.expected = fmt::format("{}", file[first]);
  fault.actual = packed.empty() ? "none" : fmt::format("{}", packed[static_cast<size_t>(first)]);
  ++out.faulty_tensors;
  if (out.faults.size() < kMaxFaults) out.faults.push_back(std::move(fault));
}

}  // namespace

Result<PackedCheck> check_packed(const Checkpoint& checkpoint, int64_t number,
                                 const MoeLayer& layer,
                                 const std::function<Status(int64_t expert)>& on_expert) {
  PackedCheck out;
  ExpertBuffers packed;
  const ExpertRange& range = layer.weights().range;
  const int64_t last = layer.config()->shared_intermediate_size > 0 ? range.count : range.count - 1;
  for (int64_t local = 0; local <= last; ++local) {
    const bool shared = local == range.count;
    const int64_t index = shared ? kSharedExpert : local;
    const int64_t global = shared ? -1 : range.global(local);
    NVFP4_MOE_ASSIGN(const LoadedExpert file,
                     shared ? checkpoint.shared_expert(number) : checkpoint.expert(number, global));
    NVFP4_MOE_TRY(layer.unpack_expert(index, packed));
    const Matrix matrices[] = {{"gate", file.source.gate, packed.gate, packed.scales.gate},
                               {"up", file.source.up, packed.up, packed.scales.up},
                               {"down", file.source.down, packed.down, packed.scales.down}};
    for (const Matrix& m : matrices) {
      if (m.file.rows == 0) continue;  // the gate if experts have no gate
      WeightFault fault;
      fault.layer = number;
      fault.expert = global;
      fault.tensor = shared ? std::string("shared expert ") + m.projection
                            : checkpoint.tensor_name(number, global, m.projection);
      const std::vector<float>* bias[] = {&packed.gate_bias, &packed.up_bias, &packed.down_bias};
      const float* of_file[] = {file.source.biases.gate, file.source.biases.up,
                                file.source.biases.down};
      compare_bias(of_file[&m - matrices], *bias[&m - matrices], m.file.rows, fault, out);
      compare(m, std::move(fault), out);
    }
    ++out.experts;
    if (!shared) NVFP4_MOE_TRY(on_expert(global));
  }
  return out;
}

}  // namespace nvfp4_moe::internal
