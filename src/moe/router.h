// The front of a router, its GEMM and its selection: the checks of a call, once for C and Python,
// and where the work is done.
//
// On the host the work is done when it returns. On a device it is enqueued in `stream`: nothing is
// allocated, waited for or read back, so that a graph can hold it. kInvalidArgument names what is
// wrong before anything is written; no number in an array is refused.
#pragma once

#include <array>

#include "backend/device_functions.h"
#include "core/router.h"
#include "core/router_gemm.h"
#include "core/status.h"
#include "moe/batch_check.h"

namespace nvfp4_moe::internal::router {

// The arrays of a selection; data is null if the config asks for none.
struct SelectionArrays {
  std::array<Array, 4> reads;   // logits first
  std::array<Array, 3> writes;  // topk_ids, topk_weights, bad_ids
};
// Tokens are above 0.
SelectionArrays arrays_of(const SelectExperts& call);

// The checks of a call, without reading an array.
Status check_call(const RouterGemm& call);
Status check_call(const SelectExperts& call);

// Without tokens the arrays may be null.
Status router_gemm(const RouterGemm& call);
// On cuda:index, where all arrays lie. functions: null for those of this build; another table for
// tests of the front.
Status device_router_gemm(int index, const RouterGemm& call, void* stream,
                          const DeviceRouter* functions = nullptr);
// Without tokens the arrays may be null; with them, what the config does not ask for must be null.
Status select_experts(const SelectExperts& call);
// As device_router_gemm.
Status device_select_experts(int index, const SelectExperts& call, void* stream,
                             const DeviceRouter* functions = nullptr);

}  // namespace nvfp4_moe::internal::router
