// quantize_checkpoint from Python, with a progress callback.
#include "convert/quantize_checkpoint.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dicts.h"
#include "errors.h"
#include "layer.h"
#include "progress.h"

namespace nvfp4_moe::internal::python {

namespace {

using Scales = std::pair<std::optional<float>, std::optional<float>>;  // hidden, intermediate
using LayerInputScales = nb::typed<nb::dict, int64_t, Scales>;

Dict quantize_files(const std::string& in, const std::string& out, const std::string& output_format,
                    std::vector<int64_t> layers, const std::string& search,
                    const std::string& calibration, bool share_gate_up_scale,
                    const LayerInputScales& input_scales, uint64_t max_shard_bytes, int threads,
                    std::optional<ProgressCallback> progress,
                    const std::optional<std::string>& gate_up_order,
                    std::vector<std::string> accept_tensors, const std::string& family,
                    const std::string& scale_coding) {
  QuantizeOptions options;
  options.format = take(parse<OutputFormat>(output_format));
  options.scale_coding = take(parse<ScaleCoding>(scale_coding));
  options.layers = std::move(layers);
  options.reading = reading_options(gate_up_order, std::move(accept_tensors), family);
  options.search = take(parse<ScaleSearch>(search));
  options.calibration = calibration;
  options.share_gate_up_scale = share_gate_up_scale;
  for (const auto& [layer, value] : input_scales) {
    int64_t number = 0;
    Scales pair;
    if (!nb::try_cast(layer, number) || !nb::try_cast(value, pair))
      fail(
          "input_scales: expected a layer's number and (hidden, intermediate), each a number or "
          "None, got " +
          std::string(nb::repr(layer).c_str()) + ": " + nb::repr(value).c_str());
    options.input_scales[number] = LayerScales{pair.first, pair.second};
  }
  options.max_shard_bytes = max_shard_bytes;
  const std::unique_ptr<Executor> executor = make_thread_pool(threads);
  options.executor = executor.get();
  PyProgress callback(std::move(progress));
  options.progress = callback.function();
  std::optional<Result<QuantizeResult>> result;
  {
    WithoutLock unlocked;
    result.emplace(quantize_checkpoint(in, out, options));
  }
  callback.rethrow();
  return parse_json(to_json(take(std::move(*result)), -1));
}

}  // namespace

void bind_quantize_checkpoint(nb::module_& m) {
  m.def("quantize_checkpoint", &quantize_files, nb::arg("source"), nb::arg("out"),
        nb::arg("output_format"), nb::arg("layers"), nb::arg("search"), nb::arg("calibration"),
        nb::arg("share_gate_up_scale"), nb::arg("input_scales"), nb::arg("max_shard_bytes"),
        nb::arg("threads"), nb::arg("progress").none(), nb::arg("gate_up_order").none(),
        nb::arg("accept_tensors"), nb::arg("family"), nb::arg("scale_coding"));
}

}  // namespace nvfp4_moe::internal::python
