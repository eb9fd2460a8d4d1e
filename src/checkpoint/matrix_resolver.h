// Finds an expert's matrices in the files by name, and checks their shapes and dtypes. Private to
// the room.
//
// locate() reads headers alone; resolve() reads the matrix's scalars too. Codes and block scales
// stay untouched by both.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/findings.h"
#include "checkpoint/layer_index.h"
#include "checkpoint/matrix_source.h"

namespace nvfp4_moe::internal {

// An input scale and whether it is usable: finite, normal and > 0. docs/reference/checkpoints.md
// lists the findings.
struct InputScale {
  std::string name;  // of the tensor
  // "" or the id: "input_scale_missing", "input_scale_zero", "unreadable", ...
  const char* finding = "";
  bool usable = false;  // the value below may be used
  float stored = 0;     // as in the file
  float value = 0;      // amax / 2688
};

class MatrixResolver {
 public:
  MatrixResolver(const TensorIndex& index, int64_t num_experts)
      : index_(index), num_experts_(num_experts) {}

  // Where the matrix lies: everything of it but its tensor scale. False if findings report an
  // error. expert is -1 for the shared expert.
  bool locate(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
              int64_t rows, int64_t cols, MatrixSource& out, FindingList& findings) const;
  // The same, and its tensor scale.
  bool resolve(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
               int64_t rows, int64_t cols, MatrixSource& out, FindingList& findings) const;
  InputScale input_scale(const ExpertNames& names, int64_t expert, Projection projection) const;

 private:
  struct Shapes;
  const TensorInfo* find(const std::string& name, TensorIndex::Ref& ref) const;
  // False with `actual` if it is none; `readable` is false if the file could not be read.
  bool scalar(const ExpertNames& names, const std::string& name, int64_t expert,
              Projection projection, TensorIndex::Ref& ref, float& out, std::string& actual,
              bool& readable) const;
  // locate() of a matrix of ggml's blocks, whose tensor is there.
  bool locate_blocks(const ExpertNames& names, const TensorIndex::Ref& tensor,
                     Projection projection, MatrixSource& out, FindingList& findings) const;
  // Where the matrix's bias lies, in families that have biases. False if findings report an error.
  bool locate_bias(const ExpertNames& names, Projection projection, MatrixSource& out,
                   FindingList& findings) const;
  // locate() without the bias.
  bool locate_weights(const ExpertNames& names, int64_t layer, int64_t expert,
                      Projection projection, int64_t rows, int64_t cols, MatrixSource& out,
                      FindingList& findings) const;
  bool other_matrix_is_k_first(const ExpertNames& names, int64_t expert, Projection projection,
                               int64_t rows, int64_t cols) const;

  const TensorIndex& index_;
  int64_t num_experts_;
};

}  // namespace nvfp4_moe::internal
