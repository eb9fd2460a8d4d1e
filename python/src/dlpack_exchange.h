// The C exchange table of DLPack 1.2 and later. With it a framework lends an array's pointer, makes
// a new array and returns its current stream without a Python call. A type offers the table as a
// capsule, `__dlpack_c_exchange_api__`.
//
// This file has only the binary layout of the protocol (dmlc/dlpack, dlpack.h, version 1).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace nvfp4_moe::internal::python {

struct DlpackVersion {
  uint32_t major;
  uint32_t minor;
};

struct DlpackManagedTensor {  // DLManagedTensorVersioned
  DlpackVersion version;
  void* manager_ctx;
  void (*deleter)(DlpackManagedTensor* self);
  uint64_t flags;
  nanobind::dlpack::dltensor tensor;
};

struct DlpackExchange {  // DLPackExchangeAPI
  DlpackVersion version;
  const DlpackExchange* previous;  // a table of an older major version, or null
  using SetError = void (*)(void* context, const char* kind, const char* message);
  int (*allocate)(nanobind::dlpack::dltensor* prototype, DlpackManagedTensor** out, void* context,
                  SetError);
  int (*export_managed)(void* object, DlpackManagedTensor** out);
  int (*import_managed)(DlpackManagedTensor* tensor, void** out_object);  // takes ownership
  int (*borrow)(void* object, nanobind::dlpack::dltensor* out);           // may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

inline constexpr uint32_t kDlpackMajor = 1;
inline constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";
inline constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

}  // namespace nvfp4_moe::internal::python
