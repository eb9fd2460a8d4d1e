// Memory and streams of a GPU, released at the end of a scope.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#define ASSERT_CUDA(...) \
  ASSERT_EQ(cudaSuccess, (__VA_ARGS__)) << cudaGetErrorString(cudaGetLastError())

namespace nvfp4_moe::internal::test {

// How often this executable has called cudaFree (memory_test.cpp).
int64_t calls_of_cuda_free();

template <class T, size_t kSlackBytes = 0>
class OnDevice {
 public:
  explicit OnDevice(size_t count) : bytes_(count * sizeof(T)) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_ + kSlackBytes), cudaSuccess);
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> back() const {
    std::vector<T> values(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// A stream that does not synchronize with the default stream.
class OwnStream {
 public:
  OwnStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~OwnStream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace nvfp4_moe::internal::test
