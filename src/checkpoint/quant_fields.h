// Shared by the dialects of quant_config.h: checked values of config fields, algorithms by name.
// Private to src/checkpoint.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/module_rules.h"
#include "checkpoint/quant_config.h"
#include "core/status.h"
#include "io/json_strict.h"

namespace nvfp4_moe::internal {

// The string under `key`, "" if the key is missing.
Result<std::string> text_field(const Json& object, const char* key);
// The same with ASCII letters in upper or lower case. Producers spell names of methods, algorithms
// and formats in different cases (ModelOpt: NVFP4, but mxfp4).
Result<std::string> upper_text(const Json& object, const char* key);
Result<std::string> lower_text(const Json& object, const char* key);
// The strings under `key`: a list, or one. Entries of other kinds do not name modules.
std::vector<std::string> strings_of(const Json& object, const char* key);

// field: the field that names the algorithm, for messages.
ModuleScheme scheme_of_algo(const std::string& algo, SourceFormat nvfp4_format,
                            const std::string& field);
Status check_group_size(const Json& object, int64_t expected, std::string_view where);
Status ignore_all(const Json& quantization, std::initializer_list<const char*> keys,
                  ModuleRules& rules);

// Declaration of `input_activations` of a group of config_groups.
struct InputActivations {
  ActivationFormat format = ActivationFormat::kBf16;
  std::string why;
};
Result<InputActivations> input_activations(const Json& group, const std::string& name);

// quantization_config of compressed-tensors; `out` has its method and producer.
Result<QuantDeclaration> parse_compressed_tensors(const Json& quantization, QuantDeclaration out);

}  // namespace nvfp4_moe::internal
