// A safetensors file of given tensors.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "safetensors/safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

struct NamedTensor {
  TensorInfo info;
  std::vector<std::byte> bytes;
};

template <class T>
NamedTensor tensor(std::string name, DType dtype, std::vector<int64_t> shape,
                   const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {{.name = std::move(name), .dtype = dtype, .shape = std::move(shape)},
          {bytes.begin(), bytes.end()}};
}

inline void write_named_tensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  std::vector<TensorInfo> infos;
  for (const NamedTensor& one : tensors) infos.push_back(one.info);
  auto writer = SafetensorsWriter::create(path, infos, {});
  ASSERT_OK(writer);
  for (const NamedTensor& one : tensors) ASSERT_OK(writer->write(one.bytes));
  ASSERT_OK(writer->finish());
}

}  // namespace nvfp4_moe::internal::test
