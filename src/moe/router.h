// Entry point of a router, its GEMM and its selection: checks a call, for C and Python, and
// dispatches it to host or device.
//
// On the host the work is done when a function returns. On a device it is enqueued in `stream`;
// nothing is allocated, waited for or read back, so a graph can capture it. kInvalidArgument names
// the wrong argument before anything is written. Numbers in arrays are never rejected.
#pragma once

#include <array>

#include "backend/device_functions.h"
#include "core/router.h"
#include "core/router_gemm.h"
#include "core/status.h"
#include "moe/batch_check.h"

namespace nvfp4_moe::internal::router {

// The arrays of a selection; data is null if the config does not use the array.
struct SelectionArrays {
  std::array<Array, 5> reads;   // logits first
  std::array<Array, 3> writes;  // topk_ids, topk_weights, bad_ids
};
// Tokens must be above 0.
SelectionArrays arrays_of(const SelectExperts& call);

// Checks a call without reading an array.
Status check_call(const RouterGemm& call);
Status check_call(const SelectExperts& call);

// Without tokens the arrays may be null.
Status router_gemm(const RouterGemm& call);
// On cuda:index, in whose memory all arrays are. functions: null for those of this build; tests
// pass their own table.
Status device_router_gemm(int index, const RouterGemm& call, void* stream,
                          const DeviceRouter* functions = nullptr);
// Without tokens the arrays may be null. With tokens, arrays that the config does not use must be
// null.
Status select_experts(const SelectExperts& call);
// See device_router_gemm.
Status device_select_experts(int index, const SelectExperts& call, void* stream,
                             const DeviceRouter* functions = nullptr);

}  // namespace nvfp4_moe::internal::router
