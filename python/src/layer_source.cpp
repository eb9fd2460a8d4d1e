#include "layer_source.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace nvfp4_moe::internal::python {

namespace {

std::string shape_text(int64_t experts, int64_t rows, int64_t cols) {
  std::string text = "(";
  text += experts < 0 ? "E" : std::to_string(experts);
  return text + ", " + std::to_string(rows) + ", " + std::to_string(cols) + ")";
}

// Unpacks the tuple of an NVFP4 matrix or stack.
std::array<nb::object, 3> three_of(nb::handle arrays, const char* name) {
  const bool listed = nb::isinstance<nb::tuple>(arrays) || nb::isinstance<nb::list>(arrays);
  if (!listed || nb::len(arrays) != 3)
    fail(std::string(name) + ": expected (codes, scales, tensor_scale), got " +
         nb::cast<std::string>(nb::str(arrays.type().attr("__name__"))));
  return {arrays[0], arrays[1], arrays[2]};
}

bool can_read(const Tensor& array) {
  return array.device().is_host() || memory_of(array.device()) != nullptr;
}

// Copies size_bytes of an array, from byte `offset` on, to host memory. stream: the stream in which
// writes to the array are queued.
Status read_bytes(const Tensor& array, int64_t offset, void* to, size_t size_bytes, void* stream) {
  const std::byte* const from = array.data() + offset;
  if (!array.device().is_host())
    return memory_of(array.device())->to_host(array.device().index, to, from, size_bytes, stream);
  std::memcpy(to, from, size_bytes);
  return {};
}

void check_bytes(const Tensor& array, int64_t experts, int64_t rows, int64_t cols) {
  const bool right = array.is_bytes() && can_read(array) && array.ndim() == 3 &&
                     (experts < 0 || array.shape(0) == experts) && array.shape(1) == rows &&
                     array.shape(2) == cols && (cols == 1 || array.stride(2) == 1) &&
                     array.stride(0) >= 0 && array.stride(1) >= 0 && array.lies_in_memory();
  if (!right)
    array.fail_expected(shape_text(experts, rows, cols) +
                        " uint8 on cpu or cuda, contiguous along the last dimension");
}

// Reads one number as float32.
float number_of(nb::handle value, const std::string& name) {
  double number = 0;
  if (!nb::try_cast(value, number, true)) {
    const nb::object item = nb::getattr(value, "item", nb::none());
    if (item.is_none() || !nb::try_cast(item(), number, true))
      fail(name + ": expected a number, got " +
           nb::cast<std::string>(nb::str(value.type().attr("__name__"))));
  }
  return static_cast<float>(number);
}

std::vector<float> tensor_scales_of(nb::handle value, const char* stack, int64_t experts) {
  const std::string name = std::string(stack) + " tensor_scale";
  const auto count = static_cast<size_t>(experts);
  double number = 0;
  if (nb::try_cast(value, number, false))
    return std::vector<float>(count, static_cast<float>(number));
  const Tensor array(value, name.c_str());
  if (array.is_f32() && can_read(array) && array.ndim() == 1 && array.shape(0) == experts &&
      array.lies_in_memory()) {
    std::vector<float> scales(count);
    if (count == 0) return scales;
    if (array.device().is_host()) {
      for (int64_t e = 0; e < experts; ++e)
        std::memcpy(&scales[static_cast<size_t>(e)],
                    array.data() + e * array.stride(0) * static_cast<int64_t>(sizeof(float)),
                    sizeof(float));
      return scales;
    }
    // One read, including the bytes between the numbers.
    const int64_t last = (experts - 1) * array.stride(0), first = std::min<int64_t>(last, 0);
    std::vector<float> span(static_cast<size_t>(std::abs(last) + 1));
    check(read_bytes(array, first * static_cast<int64_t>(sizeof(float)), span.data(),
                     span.size() * sizeof(float), array.ready_stream()));
    for (int64_t e = 0; e < experts; ++e)
      scales[static_cast<size_t>(e)] = span[static_cast<size_t>(e * array.stride(0) - first)];
    return scales;
  }
  if (array.is_f32() && can_read(array) && array.ndim() == 0) {
    float scale = 0;
    check(read_bytes(array, 0, &scale, sizeof(scale), array.ready_stream()));
    return std::vector<float>(count, scale);
  }
  array.fail_expected("(" + std::to_string(experts) + ",) float32 on cpu or cuda, or one number");
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
  codes_stream_ = codes_.ready_stream();
  scales_stream_ = scales_.ready_stream();
  tensor_scales_ = tensor_scales_of(three_of(arrays, name)[2], name, experts());
}

Nvfp4View MatrixStack::view(int64_t local_expert) const {
  const auto first_of = [&](const Tensor& array) {
    return reinterpret_cast<const uint8_t*>(array.data()) + local_expert * array.stride(0);
  };
  return {first_of(codes_),
          first_of(scales_),
          tensor_scales_[static_cast<size_t>(local_expert)],
          rows_,
          cols_,
          codes_.stride(1),
          scales_.stride(1)};
}

Result<Nvfp4View> MatrixStack::host_view(int64_t local_expert, LoadedExpert& loaded) const {
  // Copies (rows, cols) bytes of one expert from a device, with rows `stride` apart, and sets the
  // stride to the copy's.
  const auto fetch = [&](const Tensor& array, void* stream, int64_t cols,
                         int64_t& stride) -> Result<const uint8_t*> {
    const int64_t offset = local_expert * array.stride(0);
    std::vector<uint8_t>& copy = loaded.storage.emplace_back(static_cast<size_t>(rows_ * cols));
    const int64_t run = stride == cols ? rows_ : 1;  // contiguous rows
    for (int64_t row = 0; row < rows_; row += run)
      NVFP4_MOE_TRY(read_bytes(array, offset + row * stride, copy.data() + row * cols,
                               static_cast<size_t>(run * cols), stream));
    stride = cols;
    return copy.data();
  };
  Nvfp4View view = this->view(local_expert);
  if (!codes_.device().is_host()) {
    NVFP4_MOE_ASSIGN(view.codes, fetch(codes_, codes_stream_, cols_ / 2, view.codes_stride));
  }
  if (!scales_.device().is_host()) {
    NVFP4_MOE_ASSIGN(view.block_scales,
                     fetch(scales_, scales_stream_, cols_ / 16, view.scales_stride));
  }
  return view;
}

bool wants_gate(const MoeConfig& config, nb::handle gate) {
  if (has_gate(config->activation)) return true;
  if (!gate.is_none())
    fail(std::string("gate: expected None with activation ") + to_string(config->activation));
  return false;
}

ExpertFn nvfp4_source(const MatrixStack* gate, const MatrixStack& up, const MatrixStack& down,
                      const ArrayOrder& order, const Device& layer_device) {
  const bool on_device = !layer_device.is_host() &&
                         (gate == nullptr || gate->lies_on(layer_device)) &&
                         up.lies_on(layer_device) && down.lies_on(layer_device);
  if (!on_device)
    return [gate, &up, &down, order](int64_t global_expert) -> Result<LoadedExpert> {
      const int64_t e = order(global_expert);
      LoadedExpert loaded;
      if (gate != nullptr) {
        NVFP4_MOE_ASSIGN(loaded.source.gate, gate->host_view(e, loaded));
      }
      NVFP4_MOE_ASSIGN(loaded.source.up, up.host_view(e, loaded));
      NVFP4_MOE_ASSIGN(loaded.source.down, down.host_view(e, loaded));
      return loaded;
    };
  void* const stream = up.stream();
  // Arrays of several frameworks may belong to several streams, but the packer gets one.
  if ((gate != nullptr && !gate->is_in(stream)) || !up.is_in(stream) || !down.is_in(stream))
    check(memory_of(layer_device)->synchronize(layer_device.index));
  return [gate, &up, &down, order, stream](int64_t global_expert) -> Result<LoadedExpert> {
    const int64_t e = order(global_expert);
    LoadedExpert loaded;
    loaded.source = {gate == nullptr ? Nvfp4View() : gate->view(e), up.view(e), down.view(e), true,
                     stream};
    return loaded;
  };
}

namespace {

constexpr const char* kBiasNames[] = {"gate bias", "up bias", "down bias"};

// gate, up and down of biases that are not None. There is no array for gate if the layer has no
// gate. experts: -1 for the biases of one expert.
std::array<std::optional<Tensor>, 3> bias_arrays(nb::handle biases, int64_t experts,
                                                 const MoeConfig& config, int64_t inner) {
  std::array<std::optional<Tensor>, 3> arrays;
  for (size_t p = 0; p < 3; ++p) {
    const nb::object given(biases[p]);
    if (p == 0 && !has_gate(config->activation)) {
      if (!given.is_none())
        fail(std::string("gate bias: expected None with activation ") +
             to_string(config->activation));
      continue;
    }
    const Tensor& array = arrays[p].emplace(given, kBiasNames[p]);
    const int64_t length = p == 2 ? config->hidden_size : inner;
    const Sizes shape = experts < 0 ? Sizes{length} : Sizes{experts, length};
    if (!array.is_f32() || !array.device().is_host() || array.shape() != shape ||
        !array.is_contiguous())
      array.fail_expected(to_string(shape) + " of a float dtype");
  }
  return arrays;
}

// One expert's biases: (gate (inner), up (inner), down (hidden)), or None.
ExpertBiases read_biases(nb::handle biases, const MoeConfig& config, int64_t inner) {
  if (biases.is_none()) return {};
  const auto arrays = bias_arrays(biases, -1, config, inner);  // `biases` keeps their memory
  return {arrays[0] ? arrays[0]->as<const float>() : nullptr, arrays[1]->as<const float>(),
          arrays[2]->as<const float>()};
}

}  // namespace

BiasStack::BiasStack(nb::handle biases, int64_t experts, const MoeConfig& config, int64_t inner) {
  if (!biases.is_none()) arrays_ = bias_arrays(biases, experts, config, inner);
}

ExpertBiases BiasStack::of(int64_t local_expert) const {
  const auto first_of = [&](size_t p) -> const float* {
    return arrays_[p] ? arrays_[p]->as<const float>() + local_expert * arrays_[p]->shape(1)
                      : nullptr;
  };
  return {first_of(0), first_of(1), first_of(2)};
}

Nvfp4View read_matrix(nb::handle arrays, const char* name, int64_t rows, int64_t cols,
                      const Device& device, std::vector<void*>* streams) {
  const auto three = three_of(arrays, name);
  const std::string codes_name = std::string(name) + " codes",
                    scales_name = std::string(name) + " scales";
  const Tensor codes(three[0], codes_name.c_str()), scales(three[1], scales_name.c_str());
  const auto check = [&](const Tensor& array, int64_t last) {
    const bool right = array.is_bytes() && array.device() == device && array.ndim() == 2 &&
                       array.shape(0) == rows && array.shape(1) == last && array.is_contiguous();
    if (!right)
      array.fail_expected("(" + std::to_string(rows) + ", " + std::to_string(last) + ") uint8 on " +
                          to_string(device) + ", contiguous");
  };
  check(codes, cols / 2);
  check(scales, cols / 16);
  if (streams != nullptr)
    streams->insert(streams->end(), {codes.ready_stream(), scales.ready_stream()});
  return Nvfp4View::contiguous(reinterpret_cast<const uint8_t*>(codes.data()),
                               reinterpret_cast<const uint8_t*>(scales.data()),
                               number_of(three[2], std::string(name) + " tensor_scale"), rows,
                               cols);
}

ExpertSource read_expert(nb::handle gate, nb::handle up, nb::handle down, nb::handle biases,
                         const MoeConfig& config, int64_t inner, const Device& layer_device) {
  const bool gated = wants_gate(config, gate);
  const int64_t hidden = config->hidden_size;
  // All arrays must be where the first one is.
  const bool on_host = gated ? Tensor(three_of(gate, "gate")[0], "gate codes").device().is_host()
                             : Tensor(three_of(up, "up")[0], "up codes").device().is_host();
  const Device device = on_host ? Device() : layer_device;
  ExpertSource source;
  std::vector<void*> streams;
  if (gated) source.gate = read_matrix(gate, "gate", inner, hidden, device, &streams);
  source.up = read_matrix(up, "up", inner, hidden, device, &streams);
  source.down = read_matrix(down, "down", hidden, inner, device, &streams);
  source.on_device = !device.is_host();
  source.stream = streams.front();
  // Arrays of several frameworks may belong to several streams, but the packer gets one.
  if (std::count(streams.begin(), streams.end(), source.stream) !=
      static_cast<std::ptrdiff_t>(streams.size()))
    check(memory_of(device)->synchronize(device.index));
  source.biases = read_biases(biases, config, inner);
  return source;
}

}  // namespace nvfp4_moe::internal::python
