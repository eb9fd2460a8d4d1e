// Records a device's results in a small JSON file, to compare them with the results of another
// device or the emulator for the same inputs.
//
// NVFP4_MOE_RECORD=FILE writes a recording. Otherwise results are compared with
// NVFP4_MOE_RECORDING=FILE, or with tests/vectors/recorded_gpu.json if it exists; without either,
// tests that need a recording are skipped by name. One process records, and writes the file when it
// ends.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "judge/judge.h"

namespace nvfp4_moe::internal::test {

class Recording {
 public:
  // The recording of this process; null if nothing is recorded and there is nothing to compare
  // with.
  static Recording* get();
  // Makes a recorder of this device, and one that compares with a recorder's output.
  static std::unique_ptr<Recording> writer(const std::string& device);
  static std::unique_ptr<Recording> reader(const std::string& json);
  std::string json() const;

  // Each records an array under its own name. When comparing, it returns "" if the array agrees,
  // else what differs and at which place.
  //
  // Rows of equal length with fixed bits. A difference is reported as a range of rows: each of up
  // to 16 ranges has a digest.
  std::string bits(const std::string& name, const std::vector<uint8_t>& bytes, size_t row_bytes);
  // (tokens, channels) with last bits that are not fixed: stored whole, and compared within the
  // limits of a layer.
  std::string values(const std::string& name, const std::vector<float>& values, int64_t channels,
                     const LayerLimits& limits);
  // bf16 with such small errors before rounding that any correct device stores one of two
  // neighbours. Kept as the elements that differ from `expected` and their distance in steps of
  // bf16, which is at most one.
  std::string roundings(const std::string& name, const std::vector<uint16_t>& expected,
                        const std::vector<uint16_t>& actual);

  bool records() const { return records_; }
  // Elements of all roundings so far that differ from the recording.
  int64_t rounded_otherwise() const { return rounded_otherwise_; }

 private:
  std::string compare_bits(const std::string& name, const nlohmann::json& now) const;
  const nlohmann::json* find(const std::string& name) const;

  bool records_ = false;
  nlohmann::json document_;
  int64_t rounded_otherwise_ = 0;
};

}  // namespace nvfp4_moe::internal::test
