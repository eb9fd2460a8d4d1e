// Memory of torch's caching allocator on a CUDA device, taken under the stream that is to use it:
// the allocator gives a block back to the work of that stream alone, so that nothing waits.
//
// The package's _torch_memory makes the tensors; here they become Buffers, whose end needs no
// interpreter lock.
#pragma once

#include <cstddef>

#include "core/buffer.h"
#include "dlpack_exchange.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// To be kept for later runs of the stream: never out of a graph's pool or one of
// torch.cuda.use_mem_pool, even while the calling thread allocates from it. kOutOfMemory says what
// was asked for and what was free.
Result<Buffer> torch_kept(size_t size_bytes, int device, void* stream);
// For one run in a stream that is being captured: out of the memory of the graph.
Result<Buffer> torch_captured(const DlpackExchange& torch, size_t size_bytes, int device,
                              void* stream);

// An uninitialized contiguous array like Tensor::new_like's, of memory that belongs to the stream:
// `given` as in Tensor::stream_or, `stream` what that made of it.
nb::object new_like_in(const Tensor& like, const std::vector<int64_t>& shape, nb::handle given,
                       void* stream);

}  // namespace nvfp4_moe::internal::python
