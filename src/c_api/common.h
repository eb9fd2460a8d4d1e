// Shared by the C interface's files: errors per thread, the boundary that no exception crosses, and
// structs with their size.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "core/dtype.h"
#include "core/executor.h"
#include "core/status.h"
#include "nvfp4_moe/nvfp4_moe.h"

namespace nvfp4_moe::internal::c_api {

// Stores the failure for nvfp4_moe_last_error. Never allocates, so that it can report out of
// memory.
nvfp4_moe_status fail(Code code, const char* message) noexcept;

// Runs a body that returns Status, and turns every exception into a status. It is the whole body of
// every function of the C interface that returns a status (tools/check/check_boundaries.py).
template <class Body>
nvfp4_moe_status guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? NVFP4_MOE_STATUS_OK : fail(status.code(), status.message().c_str());
  } catch (...) {
    const Status status = caught_exception();
    return fail(status.code(), status.message().c_str());
  }
}

// More unknown bytes than this are taken for a mistake, not for a newer header.
inline constexpr size_t kMaxTail = 4096;

// Every sizeof is a multiple of the alignment of its first field. Another number would cut a
// pointer in two.
inline Status check_struct_size(const char* name, size_t actual, size_t known) {
  if (actual >= sizeof(size_t) && actual <= known + kMaxTail && actual % alignof(size_t) == 0)
    return {};
  return invalid_argument(std::string(name) + ".struct_size: expected sizeof, " +
                          std::to_string(known) + ", got " + std::to_string(actual));
}

// Copies the caller's struct to this library's size. Fields missing in a shorter one are zero;
// extra bytes of a longer one must be zero.
template <class Struct>
Result<Struct> read_struct(const char* name, const Struct* from) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (from == nullptr)
    return invalid_argument(std::string(name) + ": expected a pointer, got null");
  size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  NVFP4_MOE_TRY(check_struct_size(name, size, sizeof(Struct)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0)
      return unsupported(std::string(name) + ": expected zero past byte " +
                         std::to_string(sizeof(Struct)) +
                         " (fields newer than this library), got " + std::to_string(bytes[i]) +
                         " at byte " + std::to_string(i));
  }
  Struct known{};
  std::memcpy(&known, from, size < sizeof(Struct) ? size : sizeof(Struct));
  known.struct_size = sizeof(Struct);
  return known;
}

// Fills the caller's struct up to its size, and zeroes extra bytes.
template <class Struct>
Status write_struct(const char* name, Struct value, Struct* to) {
  if (to == nullptr) return invalid_argument(std::string(name) + ": expected a pointer, got null");
  size_t size = 0;
  std::memcpy(&size, to, sizeof(size));
  NVFP4_MOE_TRY(check_struct_size(name, size, sizeof(Struct)));
  value.struct_size = size;
  auto* bytes = reinterpret_cast<unsigned char*>(to);
  std::memcpy(bytes, &value, size < sizeof(Struct) ? size : sizeof(Struct));
  if (size > sizeof(Struct)) std::memset(bytes + sizeof(Struct), 0, size - sizeof(Struct));
  return {};
}

// Returns N of the device "cuda:N".
Result<int> read_gpu(const char* device);

inline Status check_pointer(const char* name, const void* pointer) {
  if (pointer != nullptr) return {};
  return invalid_argument(std::string(name) + ": expected a pointer, got null");
}

// Reads one of an enum's values, 0 to last.
template <class Enum>
Result<Enum> read_enum(const char* name, int32_t value, Enum last) {
  if (value >= 0 && value <= static_cast<int32_t>(last)) return static_cast<Enum>(value);
  return invalid_argument(std::string(name) + ": expected 0 to " +
                          std::to_string(static_cast<int32_t>(last)) + ", got " +
                          std::to_string(value));
}

inline Status check_zero(const char* name, int64_t value) {
  if (value == 0) return {};
  return invalid_argument(std::string(name) + ": expected 0, got " + std::to_string(value));
}

// Reads a dtype. DEFAULT gives `fallback`.
Result<DType> read_dtype(const char* name, nvfp4_moe_dtype value, DType fallback);
// Writes a copy that nvfp4_moe_text_free frees.
Status write_text(const std::string& text, char** out);

inline std::string backend_name(const char* name) { return name == nullptr ? "auto" : name; }

// Makes the executor for the options: a host's threads, a pool of a given size, or null for a
// layer's own.
Result<std::unique_ptr<Executor>> make_executor(nvfp4_moe_parallel_for parallel_for, void* user,
                                                int32_t threads);

}  // namespace nvfp4_moe::internal::c_api
