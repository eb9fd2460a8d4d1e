// Integer handles of layers and linears, for torch ops, whose graphs cannot carry the objects.
//
// A handle does not keep its object alive. Handles are never reused, so a stale one is recognized.
// They begin at 2, because graph compilers specialize graphs for the constants 0 and 1.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/fork.h"
#include "errors.h"

namespace nvfp4_moe::internal::python {

template <class T>
class HandleTable {
 public:
  // kind: "layer", for messages.
  explicit HandleTable(const char* kind) : kind_(kind) {}

  int64_t add(const std::shared_ptr<T>& object) {
    const std::lock_guard lock(mutex_);
    objects_.emplace(next_, object);
    return next_++;
  }
  void remove(int64_t handle) {
    const std::lock_guard lock(mutex_);
    objects_.erase(handle);
  }
  // ValueError if the object is gone or the handle was never issued.
  std::shared_ptr<T> find(int64_t handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found != objects_.end())
      if (std::shared_ptr<T> object = found->second.lock()) return object;
    const std::string name = std::string(kind_) + " handle " + std::to_string(handle);
    if (handle >= kFirst && handle < next_)
      fail(name + ": expected a live " + kind_ +
           ", got one that was dropped; keep the object as long as its handle");
    fail(name + ": expected one that a " + kind_ + " gave out, got one that none did");
  }

 private:
  static constexpr int64_t kFirst = 2;
  const char* kind_;
  mutable ForkMutex mutex_;
  std::unordered_map<int64_t, std::weak_ptr<T>> objects_;
  int64_t next_ = kFirst;
};

}  // namespace nvfp4_moe::internal::python
