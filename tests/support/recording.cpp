#include "support/recording.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>

#include "core/random.h"
#include "moe/layer.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr size_t kMostDigests = 16;

uint32_t digest(const uint8_t* bytes, size_t count) {
  uint64_t hash = count;
  for (size_t i = 0; i < count; ++i) hash = mix64(hash ^ bytes[i]);
  return static_cast<uint32_t>(hash >> 32);
}

std::string hex(const void* bytes, size_t count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    const uint8_t byte = static_cast<const uint8_t*>(bytes)[i];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}
std::vector<float> floats(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

// bf16 as integers in the order of their values, so that neighbours differ by one. -0 and +0 are
// one value.
int ordered(uint16_t bits) { return bits & 0x8000 ? -(bits & 0x7FFF) : bits; }
bool is_nan(uint16_t bits) { return (bits & 0x7FFF) > 0x7F80; }

}  // namespace

std::unique_ptr<Recording> Recording::writer(const std::string& device) {
  auto made = std::make_unique<Recording>();
  made->records_ = true;
  made->document_ = {{"device", device}, {"arrays", nlohmann::json::object()}};
  return made;
}
std::unique_ptr<Recording> Recording::reader(const std::string& json) {
  auto made = std::make_unique<Recording>();
  made->document_ = nlohmann::json::parse(json);
  return made;
}
// One line per array, so that a changed array changes one line.
std::string Recording::json() const {
  std::string text = "{\n \"device\": " + document_.at("device").dump() + ",\n \"arrays\": {";
  const char* separator = "\n";
  for (const auto& [name, array] : document_.at("arrays").items()) {
    text += separator + ("  " + nlohmann::json(name).dump()) + ": " + array.dump();
    separator = ",\n";
  }
  return text + "\n }\n}\n";
}

Recording* Recording::get() {
  static const std::unique_ptr<Recording> one = [] {
    const char *to = std::getenv("NVFP4_MOE_RECORD"), *from = std::getenv("NVFP4_MOE_RECORDING");
    if (to != nullptr && *to != 0) {
      const auto device = device_facts("cuda:0");
      return writer(device.ok() ? device->name : "no device");
    }
    const std::string path = from != nullptr && *from != 0 ? from
                                                           : NVFP4_MOE_SOURCE_DIR
                                 "/tests/vectors/recorded_gpu.json";
    return std::filesystem::exists(path) ? reader(read_file(path)) : nullptr;
  }();
  static struct AtExit {
    ~AtExit() {
      const char* to = std::getenv("NVFP4_MOE_RECORD");
      if (one != nullptr && one->records_ && to != nullptr) std::ofstream(to) << one->json();
    }
  } at_exit;
  return one.get();
}

const nlohmann::json* Recording::find(const std::string& name) const {
  const auto& arrays = document_.at("arrays");
  const auto found = arrays.find(name);
  return found == arrays.end() ? nullptr : &*found;
}

std::string Recording::bits(const std::string& name, const std::vector<uint8_t>& bytes,
                            size_t row_bytes) {
  const size_t rows = row_bytes == 0 ? 0 : bytes.size() / row_bytes;
  if (rows * row_bytes != bytes.size()) throw std::logic_error(name + ": expected whole rows");
  const size_t parts = std::min(rows, kMostDigests);
  std::string digests;
  for (size_t part = 0; part < parts; ++part) {
    const size_t first = rows * part / parts, last = rows * (part + 1) / parts;
    const uint32_t value = digest(bytes.data() + first * row_bytes, (last - first) * row_bytes);
    digests += hex(&value, sizeof value);
  }
  const nlohmann::json now = {{"rows", rows}, {"row_bytes", row_bytes}, {"digests", digests}};
  if (!records_) return compare_bits(name, now);
  document_["arrays"][name] = now;
  return "";
}

std::string Recording::compare_bits(const std::string& name, const nlohmann::json& now) const {
  const nlohmann::json* then = find(name);
  if (then == nullptr) return name + ": not in the recording";
  if (then->at("rows") != now.at("rows") || then->at("row_bytes") != now.at("row_bytes"))
    return name + ": recorded with other sizes";
  const std::string expected = then->at("digests"), actual = now.at("digests");
  if (expected.size() != actual.size()) return name + ": recorded with another number of digests";
  const size_t rows = now.at("rows"), parts = actual.size() / 8;
  std::string differing;
  for (size_t part = 0; part < parts; ++part)
    if (expected.compare(8 * part, 8, actual, 8 * part, 8) != 0)
      differing += (differing.empty() ? "" : ", ") + std::to_string(rows * part / parts) + " to " +
                   std::to_string(rows * (part + 1) / parts - 1);
  if (differing.empty()) return "";
  return name + ": rows " + differing + " are not those of " +
         document_.at("device").get<std::string>();
}

std::string Recording::values(const std::string& name, const std::vector<float>& values,
                              int64_t channels, const LayerLimits& limits) {
  if (records_) {
    document_["arrays"][name] = {{"channels", channels},
                                 {"fp32", hex(values.data(), values.size() * sizeof(float))}};
    return "";
  }
  const nlohmann::json* then = find(name);
  if (then == nullptr) return name + ": not in the recording";
  const std::vector<float> expected = floats(then->at("fp32"));
  if (expected.size() != values.size() || then->at("channels") != channels)
    return name + ": recorded with other sizes";
  const auto tokens = static_cast<int64_t>(values.size()) / channels;
  const std::string broken =
      broken_limit(compare(expected.data(), values.data(), tokens, channels), limits);
  return broken.empty() ? "" : name + ": " + broken;
}

std::string Recording::roundings(const std::string& name, const std::vector<uint16_t>& expected,
                                 const std::vector<uint16_t>& actual) {
  std::map<size_t, int> now;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (is_nan(expected[i]) && is_nan(actual[i])) continue;
    const int steps = ordered(actual[i]) - ordered(expected[i]);
    if (is_nan(expected[i]) != is_nan(actual[i]) || std::abs(steps) > 1)
      return name + ": element " + std::to_string(i) + " is " + std::to_string(steps) +
             " steps of bf16 off";
    if (steps != 0) now[i] = steps;
  }
  if (records_) {
    nlohmann::json elements = nlohmann::json::array();
    for (const auto& [element, steps] : now) elements.push_back({element, steps});
    document_["arrays"][name] = {{"elements", actual.size()}, {"differ", elements}};
    return "";
  }
  const nlohmann::json* recorded = find(name);
  if (recorded == nullptr) return name + ": not in the recording";
  if (recorded->at("elements") != actual.size()) return name + ": recorded with another size";
  std::map<size_t, int> then;
  for (const auto& pair : recorded->at("differ")) then[pair.at(0)] = pair.at(1);
  for (const auto& [element, steps] : then) {
    const auto found = now.find(element);
    const int own = found == now.end() ? 0 : found->second;
    if (std::abs(steps - own) > 1)
      return name + ": element " + std::to_string(element) +
             " is rounded two steps of bf16 from the recording";
    rounded_otherwise_ += steps != own;
  }
  for (const auto& [element, steps] : now) rounded_otherwise_ += then.count(element) == 0;
  return "";
}

}  // namespace nvfp4_moe::internal::test
