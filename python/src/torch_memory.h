// Allocates CUDA memory from torch's caching allocator, for the stream that will use it. The
// allocator reuses a freed block only in the same stream, so nothing has to wait.
//
// The package's _torch_memory makes the tensors. Here they become Buffers, which can be destroyed
// without the interpreter lock.
#pragma once

#include <cstddef>

#include "core/buffer.h"
#include "dlpack_exchange.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// For later runs of the stream: never from a graph's pool or one of torch.cuda.use_mem_pool, even
// while the calling thread allocates from it. kOutOfMemory gives the requested and the free size.
Result<Buffer> torch_kept(size_t size_bytes, int device, void* stream);
// For one run in a stream that is being captured: from the graph's memory.
Result<Buffer> torch_captured(const DlpackExchange& torch, size_t size_bytes, int device,
                              void* stream);

// An uninitialized contiguous array like Tensor::new_like's, in memory that belongs to the stream.
// `stream` is the result of Tensor::stream_or for `given`.
nb::object new_like_in(const Tensor& like, const std::vector<int64_t>& shape, nb::handle given,
                       void* stream);

}  // namespace nvfp4_moe::internal::python
