#include "float_stack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "backend/device_functions.h"
#include "checkpoint/float_source.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::python {

namespace floats {  // avoids clashes: a wheel compiles several files as one
namespace {

using Stacks = std::array<const FloatStack*, 3>;  // gate, or null without one; up, down
constexpr const char* kNames[] = {"gate", "up", "down"};

int64_t element_bytes(const FloatStack& stack) { return bits(stack.array().dtype()) / 8; }

const uint8_t* first_of(const FloatStack& stack, int64_t local_expert) {
  return reinterpret_cast<const uint8_t*>(stack.array().data()) +
         local_expert * stack.array().stride(0) * element_bytes(stack);
}

FloatMatrix matrix_of(const FloatStack& stack, const uint8_t* first) {
  const Tensor& array = stack.array();
  return {first,
          array.dtype(),
          stack.rows(),
          stack.cols(),
          array.stride(1) * element_bytes(stack),
          array.stride(2) * element_bytes(stack)};
}

Nvfp4View& view_of(ExpertSource& source, size_t projection) {
  return projection == 0 ? source.gate : projection == 1 ? source.up : source.down;
}

std::string name_of(int64_t global_expert, size_t projection) {
  return "expert " + std::to_string(global_expert) + " " + kNames[projection];
}

// Quantizes one matrix into storage of the loaded expert.
Result<Nvfp4View> quantize_into(LoadedExpert& loaded, const FloatMatrix& matrix,
                                Executor& executor) {
  NVFP4_MOE_ASSIGN(const float scale, float_matrix_scale(matrix));
  std::vector<uint8_t>& codes =
      loaded.storage.emplace_back(static_cast<size_t>(matrix.rows * (matrix.cols / 2)));
  uint8_t* const code_bytes = codes.data();
  std::vector<uint8_t>& scales =
      loaded.storage.emplace_back(static_cast<size_t>(matrix.rows * (matrix.cols / 16)));
  uint8_t* const scale_bytes = scales.data();
  constexpr int64_t kRows = 32;
  executor.parallel_for(matrix.rows, kRows, [&](int64_t begin, int64_t end) {
    FloatMatrix rows = matrix;
    rows.data += begin * matrix.row_stride;
    rows.rows = end - begin;
    QuantizeCounts counts;
    // Cannot fail: the scale's pass has checked that every element is finite.
    (void)quantize_float_matrix(rows, scale, code_bytes + begin * (matrix.cols / 2),
                                scale_bytes + begin * (matrix.cols / 16), counts);
  });
  return Nvfp4View::contiguous(code_bytes, scale_bytes, scale, matrix.rows, matrix.cols);
}

// Quantizes experts on the GPU that holds them, into memory for one expert. That suffices because a
// packer is done with an expert before it requests the next, and all work is in one stream.
class GpuQuantizer {
 public:
  GpuQuantizer(const Stacks& stacks, ArrayOrder order)
      : stacks_(stacks), order_(std::move(order)), values_(stacks[1]->rows() * stacks[1]->cols()) {
    const Device device = stacks[1]->array().device();
    device_ = device.index;
    stream_ = stacks[1]->stream();
    memory_ = memory_of(device);
    formats_ = device_formats(DeviceKind::kCuda);
  }

  Result<LoadedExpert> load(int64_t global_expert) {
    NVFP4_MOE_TRY(reserve());
    const int64_t e = order_(global_expert);
    for (size_t p = 0; p < stacks_.size(); ++p)
      if (stacks_[p] != nullptr) NVFP4_MOE_TRY(quantize(p, first_of(*stacks_[p], e)));
    float tensor_scales[3];
    NVFP4_MOE_TRY(
        memory_->to_host(device_, tensor_scales, scales_at(0), sizeof(tensor_scales), stream_));
    LoadedExpert loaded;
    loaded.source.on_device = true;
    loaded.source.stream = stream_;
    for (size_t p = 0; p < stacks_.size(); ++p) {
      if (stacks_[p] == nullptr) continue;
      const FloatStack& stack = *stacks_[p];
      if (std::isnan(tensor_scales[p]))
        return why_nan(stack, first_of(stack, e)).in(name_of(global_expert, p));
      view_of(loaded.source, p) = Nvfp4View::contiguous(
          codes_at(p), block_scales_at(p), tensor_scales[p], stack.rows(), stack.cols());
    }
    return loaded;
  }

 private:
  bool follows(const FloatStack& stack) const {
    return stack.array().stride(1) == stack.cols();
  }  // rows each other

  // Codes, block scales and tensor scales of the three matrices, and one contiguous copy of a float
  // matrix whose rows have a stride.
  Status reserve() {
    if (bytes_.data() != nullptr) return {};
    int64_t floats = 0;
    for (const FloatStack* stack : stacks_)
      if (stack != nullptr && !follows(*stack))
        floats = std::max(floats, values_ * element_bytes(*stack));
    const auto size_bytes =
        static_cast<size_t>(kFloatsAlignment + 3 * (values_ / 16 * 9) + kFloatsAlignment + floats);
    NVFP4_MOE_ASSIGN(bytes_, memory_->allocate(size_bytes, device_, "one quantized expert"));
    return {};
  }
  // rows and cols are multiples of 16, so values_ is a multiple of 256 and every offset has the
  // alignment that the quantizer needs.
  uint8_t* bytes_at(int64_t offset) const {
    return reinterpret_cast<uint8_t*>(bytes_.data()) + offset;
  }
  float* scales_at(size_t p) const { return reinterpret_cast<float*>(bytes_at(0)) + p; }
  uint8_t* codes_at(size_t p) const {
    return bytes_at(kFloatsAlignment + static_cast<int64_t>(p) * (values_ / 2));
  }
  uint8_t* block_scales_at(size_t p) const {
    return codes_at(3) + static_cast<int64_t>(p) * (values_ / 16);
  }
  uint8_t* floats_at() const {
    const int64_t end = kFloatsAlignment + 3 * (values_ / 16 * 9);
    return bytes_at((end + kFloatsAlignment - 1) / kFloatsAlignment * kFloatsAlignment);
  }

  Status quantize(size_t p, const uint8_t* first) {
    const FloatStack& stack = *stacks_[p];
    const void* x = first;
    if (!follows(stack)) {
      const int64_t element = element_bytes(stack);
      NVFP4_MOE_TRY(memory_->gather_rows(device_, floats_at(), first, stack.rows(),
                                         stack.cols() * element, stack.array().stride(1) * element,
                                         stream_));
      x = floats_at();
    }
    DeviceQuantize call;
    call.how = DeviceQuantizer::kWeights;
    call.x = x;
    call.dtype = stack.array().dtype();
    call.rows = stack.rows();
    call.cols = stack.cols();
    call.codes = codes_at(p);
    call.block_scales = block_scales_at(p);
    call.scales = scales_at(p);
    return formats_->quantize(device_, call, stream_);
  }

  // The host's error for a matrix that holds NaN or Inf.
  Status why_nan(const FloatStack& stack, const uint8_t* first) const {
    const int64_t element = element_bytes(stack);
    std::vector<uint8_t> rows(
        static_cast<size_t>((stack.rows() - 1) * stack.array().stride(1) + stack.cols()) *
        static_cast<size_t>(element));
    NVFP4_MOE_TRY(memory_->to_host(device_, rows.data(), first, rows.size(), stream_));
    const Status said = float_matrix_scale(matrix_of(stack, rows.data())).status();
    return said.ok() ? bad_input("expected finite weights, got one that is not") : said;
  }

  static constexpr int64_t kFloatsAlignment = 256;
  const Stacks stacks_;
  const ArrayOrder order_;
  const int64_t values_;  // elements of each matrix
  int device_;
  void* stream_;
  const DeviceMemory* memory_;
  const DeviceFormats* formats_;
  Buffer bytes_;
};

}  // namespace
}  // namespace floats

FloatStack::FloatStack(nb::handle array, const char* name, int64_t rows, int64_t cols)
    : array_(array, name), rows_(rows), cols_(cols) {
  const bool shaped = array_.ndim() == 3 && array_.shape(1) == rows && array_.shape(2) == cols;
  const bool readable = array_.device().is_host() ||
                        (shaped && memory_of(array_.device()) != nullptr && array_.stride(2) == 1 &&
                         array_.stride(1) >= cols && array_.stride(0) >= 0);
  if (!array_.is_floating() || !shaped || !readable || !array_.lies_in_memory())
    array_.fail_expected(
        "(E, " + std::to_string(rows) + ", " + std::to_string(cols) +
        ") bfloat16, float16 or float32 on cpu, or on cuda contiguous along the last dimension");
  stream_ = array_.ready_stream();
}

ExpertFn quantizing_source(const FloatStack* gate, const FloatStack& up, const FloatStack& down,
                           const ArrayOrder& order, const Device& layer_device,
                           Executor& executor) {
  const floats::Stacks stacks = {gate, &up, &down};
  const FloatStack& first = gate != nullptr ? *gate : up;
  const Device device = first.array().device().is_host()
                            ? Device()
                            : layer_device;  // all must be where the first one is
  for (const FloatStack* stack : stacks)
    if (stack != nullptr && !(stack->array().device() == device))
      stack->array().fail_expected(
          "gate, up and down on cpu" +
          (layer_device.is_host() ? "" : ", or all of them on " + to_string(layer_device)));
  if (!device.is_host()) {
    // Arrays of several frameworks may belong to several streams, but one stream does the work.
    if (first.stream() != up.stream() || down.stream() != up.stream())
      check(memory_of(device)->synchronize(device.index));
    const auto quantizer = std::make_shared<floats::GpuQuantizer>(stacks, order);
    return [quantizer](int64_t global_expert) { return quantizer->load(global_expert); };
  }
  return [stacks, &executor, order](int64_t global_expert) -> Result<LoadedExpert> {
    LoadedExpert loaded;
    for (size_t p = 0; p < stacks.size(); ++p) {
      if (stacks[p] == nullptr) continue;
      const FloatStack& stack = *stacks[p];
      const FloatMatrix matrix =
          floats::matrix_of(stack, floats::first_of(stack, order(global_expert)));
      auto view = floats::quantize_into(loaded, matrix, executor);
      if (!view.ok()) return view.status().in(floats::name_of(global_expert, p));
      floats::view_of(loaded.source, p) = *view;
    }
    return loaded;
  };
}

}  // namespace nvfp4_moe::internal::python
