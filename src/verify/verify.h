// verify: checks that a checkpoint, as this backend packs and runs it, is correct.
//
// Layer by layer, with one layer in memory:
//   a  findings of the checkpoint; an error stops the layer;
//   b  every expert packed by the backend is unpacked and compared with the file's bytes and tensor
//      scales, bit for bit;
//   c  the layer is run on tokens and compared with the exact reference (judge/judge.h's limits):
//      checks the kernels;
//   d  with `against`, every decoded weight is compared with the original's
//      (verify/verify_original.h): checks the quantization. Every weight must be within half a
//      step of its block's grid; a low SQNR fails only under `limit_sqnr_db`.
//
// A fault is named by layer, expert, tensor and (row, col), or by (token, channel). A fault is a
// failed check in the report (passed = false), not an error Status. An error Status means that
// verify could not do its work.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/batch.h"
#include "core/executor.h"
#include "core/progress.h"
#include "core/quantize.h"
#include "judge/judge.h"
#include "moe/layer.h"
#include "verify/states.h"

namespace nvfp4_moe::internal {

class MoeLayer;

inline constexpr size_t kMaxFaults = 8;  // most faulty tensors that a report lists

struct VerifyOptions {
  std::string
      against;  // directory of the original: bf16/fp16/fp32, MXFP4, or any checkpoint that loads
  CheckpointOptions reading;    // for both
  std::vector<int64_t> layers;  // empty: all
  ExpertRange range;     // count 0: all experts; otherwise only these are packed, compared and run
  std::string input;     // states file (verify/states.h); empty: seeded
  StatesOptions states;  // 0 tokens: skips step c
  std::string backend = "auto";
  std::string device = "cpu";  // device of the backend's layers; the reference runs on the host
  std::optional<double> limit_sqnr_db;  // with `against`: a layer below it fails
  // Changes the options of a layer's run (activation_format, scales, ...); empty: as the
  // checkpoint's family defines them.
  std::function<void(MoeOptions&)> adjust;
  // True: the checkpoint's rule gives the activation format; false: adjust does.
  bool choose_format = true;
  Executor* executor = nullptr;  // null: serial
  ProgressFn progress;  // what = "verify"; counts experts times steps, item "layer 3 expert 7:
                        // unpack and compare"
};

// One place at which two weights differ.
struct WeightFault {
  int64_t layer = -1;
  int64_t expert = -1;     // global
  std::string projection;  // "gate", "up", "down"
  std::string tensor;      // its name in the files
  std::string what;        // "code", "block_scale", "tensor_scale", "half_step"
  int64_t row = -1;        // of the matrix; -1 if the whole tensor differs
  int64_t col = -1;        // element along K; the first of the block for a block scale
  std::string expected;
  std::string actual;
};
std::string to_string(const WeightFault& fault);  // "layer 1 expert 7 ...w1.weight (12, 345): code:
                                                  // expected 0x3, got 0x5"

// Result of step b.
struct PackedCheck {
  int64_t experts = 0;
  uint64_t bytes_compared = 0;
  int64_t faulty_tensors = 0;
  uint64_t differing_bytes = 0;
  std::vector<WeightFault> faults;  // the first of each faulty tensor, at most kMaxFaults
  bool passed() const { return faulty_tensors == 0; }
};

// Result of step c.
struct RunCheck {
  std::string backend;
  std::string states;  // LayerStates::source
  int64_t tokens = 0;
  // (num_experts) assignments of each expert, without -1 ids. Empty if the ids were drawn from the
  // seed: verify does not run the router, so they are not the model's load.
  std::vector<int64_t> expert_load;
  Comparison comparison;
  LayerLimits limits;
  std::string broken;  // empty if the limits hold
  RunStatus status;
  RunStatus reference_status;
  double backend_seconds = 0;
  double reference_seconds = 0;
  bool backend_is_reference = false;  // the comparison is then not a test of kernels
  bool passed() const { return broken.empty(); }
};

// The quantization error of one expert's weights.
struct ExpertError {
  int64_t expert = -1;  // global
  double relative_l2 = 0;
  double sqnr_db = 0;  // +inf if nothing was lost
};

// Result of step d. Metrics over all compared weights of the layer.
struct OriginalCheck {
  std::string format;  // of the original
  uint64_t weights = 0;
  double sqnr_db = 0;  // whole layer; +inf if nothing was lost
  double gate_sqnr_db = 0, up_sqnr_db = 0, down_sqnr_db = 0;
  double cosine = 1;
  double relative_l2 = 0;
  std::vector<ExpertError> experts;  // those that were compared
  double max_abs = 0;                // the largest |decoded - original| and where it is
  int64_t max_expert = -1;
  std::string max_tensor;
  int64_t max_row = -1, max_col = -1;
  // |w| beyond the top code of its block, explained by the scale's rounding or by a search
  uint64_t saturated = 0;
  uint64_t clipped_blocks = 0;     // blocks among these that only a search (mse, 4/6) explains
  uint64_t zeroed_blocks = 0;      // blocks that are not zero in the original but decode to zero
  uint64_t near_ties = 0;          // within bf16 rounding of a tie (verify/verify_original.h)
  uint64_t broken_half_steps = 0;  // weights outside their code's interval
  int64_t faulty_tensors = 0;
  std::vector<WeightFault> faults;  // the first of each faulty tensor, at most kMaxFaults
  std::string
      hint;  // the likely fault of the first faulty tensor: "matches the original's up_proj", ...
  bool below_limit = false;
  bool passed() const { return broken_half_steps == 0 && !below_limit; }
};

struct LayerVerification {
  int64_t layer = 0;
  MoeOptions options;
  std::string activations_because;  // why options.activation_format has its value
  std::vector<Finding> findings;
  std::optional<Fp8LayerWeights> fp8;  // of the packed layer, under activation_format fp8
  std::optional<PackedCheck> packed;
  std::optional<RunCheck> run;
  std::optional<OriginalCheck> original;
  std::vector<std::string>
      failures;  // one line each, most important first; empty if the layer passed
  double seconds = 0;
  bool passed() const { return failures.empty(); }
};

struct VerifyReport {
  std::string path;
  std::string against;
  std::string format;
  std::string family;
  std::vector<Finding> findings;  // of opening
  std::vector<LayerVerification> layers;
  double seconds = 0;
  bool passed() const;
  int64_t failed_layers() const;
};
std::string to_json(const VerifyReport& report, int indent = 2);

Result<VerifyReport> verify(const std::string& path, const VerifyOptions& options);

}  // namespace nvfp4_moe::internal
