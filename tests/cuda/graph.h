// A CUDA graph for tests: captured once, replayed any number of times.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "core/status.h"

namespace nvfp4_moe::internal::test {

class Graph {
 public:
  // Captures the work that `enqueue`, a callable that returns a Status, puts into the stream. Run
  // `enqueue` once before: a capture cannot load what a first call loads.
  template <class Enqueue>
  Graph(cudaStream_t stream, const Enqueue& enqueue,
        cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal)
      : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
    status_ = enqueue();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
    if (graph_ == nullptr) return;
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  ~Graph() {
    EXPECT_TRUE(executable_ == nullptr || cudaGraphExecDestroy(executable_) == cudaSuccess);
    EXPECT_TRUE(graph_ == nullptr || cudaGraphDestroy(graph_) == cudaSuccess);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // The Status of `enqueue` during the capture.
  const Status& status() const { return status_; }
  // Launches in the stream of the capture, without waiting.
  void launch() const { EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess); }

 private:
  const cudaStream_t stream_;
  Status status_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace nvfp4_moe::internal::test
