#include "layer_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/float_source.h"

namespace nvfp4_moe::python {

namespace {

std::string shape_text(int64_t experts, int64_t rows, int64_t cols) {
  std::string text = "(";
  text += experts < 0 ? "E" : std::to_string(experts);
  return text + ", " + std::to_string(rows) + ", " + std::to_string(cols) + ")";
}

// The tuple of an NVFP4 matrix or stack.
std::array<nb::object, 3> three_of(nb::handle arrays, const char* name) {
  const bool listed = nb::isinstance<nb::tuple>(arrays) || nb::isinstance<nb::list>(arrays);
  if (!listed || nb::len(arrays) != 3)
    fail(std::string(name) + ": expected (codes, scales, tensor_scale), got " +
         nb::cast<std::string>(nb::str(arrays.type().attr("__name__"))));
  return {arrays[0], arrays[1], arrays[2]};
}

bool can_read(const Tensor& array) { return array.device().is_host() || memory_of(array.device()) != nullptr; }

// size_bytes of an array from byte `offset` on, in host memory.
Status read_bytes(const Tensor& array, int64_t offset, void* to, size_t size_bytes) {
  const std::byte* const from = array.data() + offset;
  if (!array.device().is_host())
    return memory_of(array.device())->to_host(array.device().index, to, from, size_bytes, nullptr);
  std::memcpy(to, from, size_bytes);
  return {};
}

void check_bytes(const Tensor& array, int64_t experts, int64_t rows, int64_t cols) {
  const bool right = array.is_bytes() && can_read(array) && array.ndim() == 3 &&
                     (experts < 0 || array.shape(0) == experts) && array.shape(1) == rows && array.shape(2) == cols &&
                     (cols == 1 || array.stride(2) == 1) && array.stride(0) >= 0 && array.stride(1) >= 0;
  if (!right)
    array.fail_expected(shape_text(experts, rows, cols) + " uint8 on cpu or cuda, contiguous along the last dimension");
}

// One number as float32.
float number_of(nb::handle value, const std::string& name) {
  double number = 0;
  if (!nb::try_cast(value, number, true)) {
    const nb::object item = nb::getattr(value, "item", nb::none());
    if (item.is_none() || !nb::try_cast(item(), number, true))
      fail(name + ": expected a number, got " + nb::cast<std::string>(nb::str(value.type().attr("__name__"))));
  }
  return static_cast<float>(number);
}

std::vector<float> tensor_scales_of(nb::handle value, const char* stack, int64_t experts) {
  const std::string name = std::string(stack) + " tensor_scale";
  const auto count = static_cast<size_t>(experts);
  double number = 0;
  if (nb::try_cast(value, number, false)) return std::vector<float>(count, static_cast<float>(number));
  const Tensor array(value, name.c_str());
  if (array.is_f32() && can_read(array) && array.ndim() == 1 && array.shape(0) == experts) {
    std::vector<float> scales(count);
    if (array.stride(0) == 1) {
      check(read_bytes(array, 0, scales.data(), count * sizeof(float)));
    } else {
      for (size_t e = 0; e < count; ++e)
        check(read_bytes(array, static_cast<int64_t>(e * sizeof(float)) * array.stride(0), &scales[e], sizeof(float)));
    }
    return scales;
  }
  if (array.is_f32() && can_read(array) && array.ndim() == 0) {
    float scale = 0;
    check(read_bytes(array, 0, &scale, sizeof(scale)));
    return std::vector<float>(count, scale);
  }
  array.fail_expected("(" + std::to_string(experts) + ",) float32 on cpu or cuda, or one number");
}

FloatMatrix matrix_of(const FloatStack& stack, int64_t local_expert) {
  const Tensor& array = stack.array();
  const int64_t size = bits(array.dtype()) / 8;
  return {reinterpret_cast<const uint8_t*>(array.data()) + local_expert * array.stride(0) * size,
          array.dtype(),
          stack.rows(),
          stack.cols(),
          array.stride(1) * size,
          array.stride(2) * size};
}

// Quantizes one matrix into storage of the loaded expert.
Result<Nvfp4View> quantize_into(LoadedExpert& loaded, const FloatMatrix& matrix, Executor& executor) {
  NVFP4_MOE_ASSIGN(const float scale, float_matrix_scale(matrix));
  std::vector<uint8_t>& codes = loaded.storage.emplace_back(static_cast<size_t>(matrix.rows * (matrix.cols / 2)));
  uint8_t* const code_bytes = codes.data();
  std::vector<uint8_t>& scales = loaded.storage.emplace_back(static_cast<size_t>(matrix.rows * (matrix.cols / 16)));
  uint8_t* const scale_bytes = scales.data();
  constexpr int64_t kRows = 32;
  executor.parallel_for(matrix.rows, kRows, [&](int64_t begin, int64_t end) {
    FloatMatrix rows = matrix;
    rows.data += begin * matrix.row_stride;
    rows.rows = end - begin;
    QuantizeCounts counts;
    // Cannot fail: the scale's pass has seen every element finite.
    (void)quantize_float_matrix(rows, scale, code_bytes + begin * (matrix.cols / 2),
                                scale_bytes + begin * (matrix.cols / 16), counts);
  });
  return Nvfp4View::contiguous(code_bytes, scale_bytes, scale, matrix.rows, matrix.cols);
}

}  // namespace

MatrixStack::MatrixStack(nb::handle arrays, const char* name, int64_t rows, int64_t cols)
    : codes_name_(std::string(name) + " codes"),
      scales_name_(std::string(name) + " scales"),
      codes_(three_of(arrays, name)[0], codes_name_.c_str()),
      scales_(three_of(arrays, name)[1], scales_name_.c_str()),
      rows_(rows),
      cols_(cols) {
  check_bytes(codes_, -1, rows, cols / 2);
  check_bytes(scales_, experts(), rows, cols / 16);
  // What made the arrays may still run, in a stream of the framework's.
  for (const Tensor* array : {&codes_, &scales_})
    if (!array->device().is_host()) check(memory_of(array->device())->synchronize(array->device().index));
  tensor_scales_ = tensor_scales_of(three_of(arrays, name)[2], name, experts());
}

Result<Nvfp4View> MatrixStack::expert(int64_t local_expert, LoadedExpert& loaded) const {
  // (rows, cols) bytes of one expert and the distance of its rows.
  const auto bytes_of = [&](const Tensor& array, int64_t cols, int64_t& stride) -> Result<const uint8_t*> {
    const int64_t offset = local_expert * array.stride(0);
    stride = array.stride(1);
    if (array.device().is_host()) return reinterpret_cast<const uint8_t*>(array.data()) + offset;
    std::vector<uint8_t>& copy = loaded.storage.emplace_back(static_cast<size_t>(rows_ * cols));
    const int64_t run = stride == cols ? rows_ : 1;  // rows that follow each other
    for (int64_t row = 0; row < rows_; row += run)
      NVFP4_MOE_TRY(
          read_bytes(array, offset + row * stride, copy.data() + row * cols, static_cast<size_t>(run * cols)));
    stride = cols;
    return copy.data();
  };
  Nvfp4View view;
  view.tensor_scale = tensor_scales_[static_cast<size_t>(local_expert)];
  view.rows = rows_;
  view.cols = cols_;
  NVFP4_MOE_ASSIGN(view.codes, bytes_of(codes_, cols_ / 2, view.codes_stride));
  NVFP4_MOE_ASSIGN(view.block_scales, bytes_of(scales_, cols_ / 16, view.scales_stride));
  return view;
}

FloatStack::FloatStack(nb::handle array, const char* name, int64_t rows, int64_t cols)
    : array_(array, name), rows_(rows), cols_(cols) {
  const bool right = array_.is_floating() && array_.device().is_host() && array_.ndim() == 3 &&
                     array_.shape(1) == rows && array_.shape(2) == cols;
  if (!right) array_.fail_expected(shape_text(-1, rows, cols) + " bfloat16, float16 or float32 on cpu");
}

Nvfp4View read_matrix(nb::handle arrays, const char* name, int64_t rows, int64_t cols) {
  const auto three = three_of(arrays, name);
  const std::string codes_name = std::string(name) + " codes", scales_name = std::string(name) + " scales";
  const Tensor codes(three[0], codes_name.c_str()), scales(three[1], scales_name.c_str());
  const auto check = [&](const Tensor& array, int64_t last) {
    const bool right = array.is_bytes() && array.device().is_host() && array.ndim() == 2 && array.shape(0) == rows &&
                       array.shape(1) == last && array.is_contiguous();
    if (!right)
      array.fail_expected("(" + std::to_string(rows) + ", " + std::to_string(last) + ") uint8 on cpu, contiguous");
  };
  check(codes, cols / 2);
  check(scales, cols / 16);
  return Nvfp4View::contiguous(reinterpret_cast<const uint8_t*>(codes.data()),
                               reinterpret_cast<const uint8_t*>(scales.data()),
                               number_of(three[2], std::string(name) + " tensor_scale"), rows, cols);
}

std::function<Result<LoadedExpert>(int64_t global_expert)> quantizing_source(const FloatStack& gate,
                                                                             const FloatStack& up,
                                                                             const FloatStack& down,
                                                                             int64_t first_expert, Executor& executor) {
  return [&gate, &up, &down, &executor, first_expert](int64_t global_expert) -> Result<LoadedExpert> {
    const int64_t e = global_expert - first_expert;
    LoadedExpert loaded;
    const struct {
      const char* name;
      const FloatStack& stack;
      Nvfp4View& view;
    } parts[] = {{"gate", gate, loaded.source.gate}, {"up", up, loaded.source.up}, {"down", down, loaded.source.down}};
    for (const auto& part : parts) {
      auto view = quantize_into(loaded, matrix_of(part.stack, e), executor);
      if (!view.ok()) return view.status().in("expert " + std::to_string(global_expert) + " " + part.name);
      part.view = *view;
    }
    return loaded;
  };
}

}  // namespace nvfp4_moe::python
