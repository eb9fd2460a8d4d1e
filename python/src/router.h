// Expert selection from Python: checks the arrays and makes the library's request.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "core/router.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// The fields of the package's RouterConfig, in its order.
using RouterFields = std::tuple<int64_t, int64_t, std::string, bool, double, double, int64_t,
                                int64_t, std::string, bool, bool, bool>;
// Returns a checked config.
RouterConfig router_config(const RouterFields& fields);

// All but logits may be None.
struct SelectionArrays {
  nb::handle logits;           // (T, E) bf16, fp16 or fp32
  nb::handle correction_bias;  // (E) float32
  nb::handle expert_scale;     // (E) float32
  nb::handle token_ids;        // (T) int32 or int64
  nb::handle hash_table;       // (vocab_size, k) int32 or int64
  nb::handle out;      // a tuple of topk_ids (T, k) int32 or int64, and topk_weights (T, k) float32
  nb::handle bad_ids;  // (1) int64
};

// Keeps its arrays alive. Without out, logits' framework makes the output arrays, with ids of
// ids_dtype.
class Selection {
 public:
  Selection(const RouterConfig& config, const SelectionArrays& arrays, DType ids_dtype);
  const SelectExperts& call() const { return call_; }
  const Tensor& logits() const { return *logits_; }
  const Tensor& ids() const { return *ids_; }
  const Tensor& weights() const { return *weights_; }

 private:
  SelectExperts call_;
  std::optional<Tensor> logits_, bias_, scale_, token_ids_, table_, bad_ids_, ids_, weights_;
};

}  // namespace nvfp4_moe::internal::python
