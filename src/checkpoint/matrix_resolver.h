// Finds an expert's matrices in the files by name, and checks their shapes and dtypes. Private to
// src/checkpoint.
//
// locate() reads only headers. resolve() reads the matrix's scalars too. Neither reads codes or
// block scales.
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

  // Finds everything of the matrix except its tensor scale. False if an error was added to
  // findings. expert is -1 for the shared expert.
  bool locate(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
              int64_t rows, int64_t cols, MatrixSource& out, FindingList& findings) const;
  // The same, and its tensor scale.
  bool resolve(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
               int64_t rows, int64_t cols, MatrixSource& out, FindingList& findings) const;
  InputScale input_scale(const ExpertNames& names, int64_t expert, Projection projection) const;

 private:
  struct Shapes;
  const TensorInfo* find(const std::string& name, TensorIndex::Ref& ref) const;
  // False, with `actual` set, if it is not a scalar. `readable` is false if the file could not be
  // read.
  bool scalar(const ExpertNames& names, const std::string& name, int64_t expert,
              Projection projection, TensorIndex::Ref& ref, float& out, std::string& actual,
              bool& readable) const;
  // locate() for a matrix in ggml's blocks, whose tensor exists.
  bool locate_blocks(const ExpertNames& names, const TensorIndex::Ref& tensor,
                     Projection projection, MatrixSource& out, FindingList& findings) const;
  // Finds the matrix's bias, for families with biases. False if an error was added to findings.
  bool locate_bias(const ExpertNames& names, Projection projection, MatrixSource& out,
                   FindingList& findings) const;
  // locate() without the bias.
  bool locate_weights(const ExpertNames& names, int64_t layer, int64_t expert,
                      Projection projection, int64_t rows, int64_t cols, MatrixSource& out,
                      FindingList& findings) const;
  // Finds coded scales of the whole stored matrix (rows, cols). False if an error was added.
  bool locate_csf(const ExpertNames& names, int64_t rows, int64_t cols, MatrixSource& out,
                  FindingList& findings) const;
  bool other_matrix_is_k_first(const ExpertNames& names, int64_t expert, Projection projection,
                               int64_t rows, int64_t cols) const;

  const TensorIndex& index_;
  int64_t num_experts_;
};

}  // namespace nvfp4_moe::internal
