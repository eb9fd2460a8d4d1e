// Buffer: owned bytes with a deleter, so that packed weights may live in anonymous memory, a mapped
// file or a device.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "core/status.h"

namespace nvfp4_moe::internal {

class Buffer {
 public:
  Buffer() = default;
  Buffer(std::byte* data, size_t size_bytes, std::function<void(std::byte*, size_t)> release)
      : data_(data), size_bytes_(size_bytes), release_(std::move(release)) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr && release_) release_(data_, size_bytes_);
  }

  std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(release_, other.release_);
  }
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
  std::function<void(std::byte*, size_t)> release_;
};

// Allocates anonymous zero-filled pages (mmap). They use memory only once written, and return to
// the system on release. purpose names their use in the message of kOutOfMemory.
Result<Buffer> allocate_pages(size_t size_bytes, const char* purpose = "memory");
// kOutOfMemory: "PURPOSE: expected SIZE bytes on DEVICE, FREE of TOTAL are free: out of memory".
Status out_of_memory(const char* purpose, size_t size_bytes, const std::string& where,
                     size_t free_bytes, size_t total_bytes);

}  // namespace nvfp4_moe::internal
