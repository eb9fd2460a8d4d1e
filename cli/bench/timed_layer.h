// TimedLayer: a layer for `bench`. It has several copies, and batches touch the experts that were
// least recently touched, so that no call finds its weights in a cache.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cli/bench/random_layer.h"
#include "cli/bench/subject.h"
#include "core/executor.h"
#include "moe/layer.h"
#include "moe/placed_batch.h"

namespace nvfp4_moe::internal::cli {

// How long to repeat a call.
struct Repeat {
  double seconds = 1.0;  // but at least five runs
  int64_t most_runs = 1000;
};

struct RunTimes {
  // Times of the runs, ascending; never empty. On a device: of replays of a graph of all batches,
  // divided by the number of batches.
  std::vector<double> us;
  double experts = 0;  // touched by a run, mean
  double at(double share) const {
    return us[static_cast<size_t>(share * static_cast<double>(us.size() - 1) + 0.5)];
  }
};

inline constexpr const char* kStepNames[] = {"route",      "quantize", "gemm1_swiglu",
                                             "requantize", "gemm2",    "combine"};
inline constexpr size_t kSteps = std::size(kStepNames);
inline constexpr size_t kGemm1 = 2, kGemm2 = 4;

// Batches that find no weights in a cache if they alternate between copies of a layer: batch i is
// for copy i % copies.
struct ColdBatches {
  std::vector<RandomTokens> tokens;  // the same number for each copy, at least kLeastBatches
  std::vector<double> experts;       // touched by each batch
};
// Uniformly random routing over the range, the same for every layer of the same sizes and seed.
// Each batch touches the experts that were least recently touched in its copy.
ColdBatches cold_batches(const MoeOptions& options, const ExpertRange& range, int64_t tokens,
                         uint64_t seed, size_t copies);
inline constexpr size_t kLeastBatches = 8;

inline constexpr int64_t kLeastRuns = 5;    // timed runs, however long they take
inline constexpr int64_t kUntimedRuns = 2;  // before them, to fault in the workspace

class TimedLayer {
 public:
  // Packs `copies` copies. backend: a name from the registry. device: as in LayerOptions.
  static Result<TimedLayer> open(const Subject& subject, const std::string& backend,
                                 const std::string& device, int64_t max_tokens, int64_t copies,
                                 Executor& executor, const ProgressFn& progress);
  const MoeLayer& layer() const { return *copies_.front(); }

  // Sets the batches to time next: cold_batches, or the caller's.
  Status prepare(int64_t tokens, uint64_t seed);
  Status prepare(std::shared_ptr<ColdBatches> batches);
  Result<RunTimes> time_runs(const Repeat& repeat);
  // Median microseconds of each step, timed in the order of a run. Unlike in a run, a GEMM of the
  // CPU backend makes its operands itself from the arrays between the steps, and a device routes
  // and quantizes in two kernels instead of one. kUnsupported if a backend does not expose its
  // steps.
  Result<std::array<double, kSteps>> time_steps(const Repeat& repeat);

 private:
  TimedLayer(const Subject& subject, std::vector<std::unique_ptr<MoeLayer>> copies,
             Buffer workspace)
      : options_(subject.options),
        range_(subject.range),
        copies_(std::move(copies)),
        workspace_(std::move(workspace)) {}
  Result<RunTimes> time_replays(const Repeat& repeat) const;
  Result<std::array<double, kSteps>> time_steps(const Repeat& repeat, const LayerBuffers& buffers,
                                                const Arena& scratch);
  Result<std::array<double, kSteps>> time_device_steps(const Repeat& repeat,
                                                       const LayerBuffers& buffers,
                                                       const Arena& scratch) const;
  template <class Body>
  Result<std::vector<size_t>> repeat_calls(const Repeat& repeat, const Body& body);

  MoeOptions options_;
  ExpertRange range_;
  std::vector<std::unique_ptr<MoeLayer>> copies_;
  Buffer workspace_;
  std::shared_ptr<ColdBatches> batches_;
  std::vector<PlacedBatch> placed_;  // on a device: the batches in its memory
  size_t next_ = 0;                  // the next call's batch
};

// Renames the experts of a batch so that it touches those at the front of `oldest`, and moves these
// to its back. The batch stays equally random. Returns how many experts it touches.
size_t touch_oldest(RandomTokens& batch, std::vector<int32_t>& oldest);

// The median of a non-empty vector; for an even count, the mean of the two in the middle.
double median(std::vector<double> values);

}  // namespace nvfp4_moe::internal::cli
