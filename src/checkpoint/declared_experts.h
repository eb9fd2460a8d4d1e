// A config's declarations for a layer's experts, matrix by matrix, and whether the files agree.
// Private to src/checkpoint.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

struct DeclaredExperts {
  bool gguf = false;  // the types of the tensors are the declaration
  std::string algo;   // empty: the config declares nothing about these experts
  SourceFormat format = SourceFormat::kFloat;
  bool csf = false;                 // block scales are declared to be coded as CSF
  DeclaredActivations activations;  // the most precise ones of all matrices
  Status refusal;                   // why they are not loaded, unless they are floats
  Status rotation;                  // why they are not loaded, floats or not

  const Status& refusal_of(bool floats) const {
    return floats || !rotation.ok() ? rotation : refusal;
  }
  // The declaration for experts with this storage.
  DeclaredActivations activations_of(const FormatParts& parts) const;
};

// The declarations for the routed experts `experts`, or for the shared one ({-1}). Errors are the
// config's.
Result<DeclaredExperts> declared_experts(const ModelInfo& model, const ExpertNames& names,
                                         std::span<const int64_t> experts);

// Checks whether a layer may be stored as `found` if the config declares something else.
Status check_declared(const ModelInfo& model, const DeclaredExperts& declared, SourceFormat found,
                      int64_t layer, const std::string& name, FindingList& findings);

// kUnsupported if one of the expert's matrices is stored in another format than `first`.
Status check_one_format(const TensorIndex& index, const ExpertNames& names, int64_t expert,
                        const FormatParts& first);

// kUnsupported if the declaration of a shared expert with this storage needs activations that the
// layer does not compute.
Status check_shared_declaration(const ModelInfo& model, const ExpertNames& names,
                                const FormatParts& parts, const DeclaredActivations& routed);

}  // namespace nvfp4_moe::internal
