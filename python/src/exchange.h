// A layer's options for an exchange, and the Python classes that hold one.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"
#include "parallel/open.h"

namespace nvfp4_moe::internal::python {

// (exchange or None, combine, capacity, placement or None), as the package's functions pass them.
struct ParallelFields {
  nanobind::handle exchange;
  std::string combine;
  int64_t capacity = 0;
  std::optional<std::vector<int64_t>> placement;  // the expert of each slot
  // set once the other ranks receive a failure without further calls
  mutable bool reported = false;
  explicit ParallelFields(nanobind::handle fields);
};
// Null without an exchange, or if its ranks have received a failure.
std::shared_ptr<Exchange> unreported_exchange(const ParallelFields& fields);
// Runs open(). If it fails before the ranks have exchanged anything, broadcasts the failure to
// them, because they wait.
template <class Open>
auto or_report(const ParallelFields& fields, const Open& open) {
  try {
    return open();
  } catch (const std::exception& raised) {
    const std::shared_ptr<Exchange> exchange = unreported_exchange(fields);
    if (exchange == nullptr) throw;
    raise_on_all_ranks(raised, [&](const Status& failure) { return exchange->agree(failure); });
  }
}

// Returns nullopt without an exchange. ValueError if options are given without an exchange, or if
// the layer's sizes do not allow them.
std::optional<Parallel> parallel_of(const ParallelFields& fields, int64_t num_experts);

}  // namespace nvfp4_moe::internal::python
