// The functions of a device for a layer over ranks: ids to slots, totals over ranks, and the
// packets of all_to_all.
//
// Each function enqueues in a stream and returns: it allocates nothing, does not synchronize, and
// can be captured.
//
// A token lives on its source rank. One packet of it goes to each expert rank, a rank that holds
// experts of the token:
//
//   packet   activations | slots (k) int32 | weights (k) fp32 | first_row int32, rounded up to 16
//            bytes
//
// activations: the arrays of their format, one after another, all that gemm1 reads. slots: -1 if
// the assignment is not of the expert rank. The rows come back packet by packet, k by k. first_row
// is the number of rows that the message's earlier packets ask for, so that a packet can be
// processed without them. With peer memory each row has an offset of its own, and first_row is
// neither written nor read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/layer_steps.h"
#include "core/batch.h"
#include "core/peer_memory.h"
#include "core/scale_layout.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// One array of a token's activations: rows of row_bytes.
struct WireArray {
  void* rows = nullptr;
  int64_t row_bytes = 0;
  std::byte* row(int64_t token) const { return static_cast<std::byte*>(rows) + token * row_bytes; }
};
inline constexpr int kWireArrays = 4;  // at most; the others have no bytes

inline std::array<WireArray, kWireArrays> wire_arrays(const ActivationBuffers& activations,
                                                      ActivationFormat format, int64_t hidden) {
  const WireArray nonfinite{activations.nonfinite, 1}, row_scale{activations.row_scale, 4};
  switch (format) {
    case ActivationFormat::kNvfp4:
      return {{{activations.codes, hidden / 2},
               {activations.block_scales, hidden / 16},
               row_scale,
               nonfinite}};
    case ActivationFormat::kBf16: return {{{activations.bf16, 2 * hidden}, nonfinite, {}, {}}};
    case ActivationFormat::kInt8Block:
      return {{{activations.int8_codes, hidden},
               {activations.int8_scales, hidden / 16 * 4},
               nonfinite,
               {}}};
    case ActivationFormat::kFp8: return {{{activations.fp8, hidden}, row_scale, nonfinite, {}}};
  }
  return {};
}

// Offsets of the parts of a packet, and its size.
struct PacketFormat {
  int64_t top_k = 0;
  int64_t slots_at = 0, weights_at = 0, first_row_at = 0;  // multiples of 4
  int64_t bytes = 0;                                       // a multiple of 16
  int64_t row_bytes = 0;                                   // of what comes back for each slot

  PacketFormat() = default;
  explicit PacketFormat(const MoeConfig& config) : top_k(config->top_k) {
    for (const WireArray& array : wire_arrays({}, config->activation_format, config->hidden_size))
      slots_at += array.row_bytes;
    slots_at = round_up(slots_at, sizeof(int32_t));
    weights_at = slots_at + top_k * 4;
    first_row_at = weights_at + top_k * 4;
    bytes = round_up(first_row_at + 4, 16);
    row_bytes = config->hidden_size * (config->row_format == RowFormat::kBf16 ? 2 : 4);
  }
};

// ids (tokens, top_k) -> slots, and load (num_experts) += how often each expert was chosen. An
// expert's slots take turns: assignment k of token t has turn source + t + k
// (parallel/placement.h). -1 stays -1; another id that is no expert's is -2.
struct SlotsOfIds {
  const void* ids = nullptr;  // (tokens, top_k)
  DType ids_dtype = DType::kI64;
  int64_t tokens = 0, top_k = 0, num_experts = 0, source = 0;
  // (num_experts + 1) where an expert's slots begin below
  const int32_t* first_of_expert = nullptr;
  const int32_t* slots_of_expert = nullptr;  // (slots)
  int32_t* slots = nullptr;                  // (tokens, top_k)
  uint64_t* load = nullptr;                  // (num_experts)
};

// parts (ranks, count) fp32 -> out (count): added in the order of the ranks, rounded once to out's
// dtype.
struct SumOfRanks {
  const float* parts = nullptr;
  int64_t ranks = 0, count = 0;  // count: a multiple of 8
  void* out = nullptr;
  DType out_dtype = DType::kBf16;
};

// The last step of a sum over the ranks: *nonfinite = how many of values are NaN or Inf. If the
// ranks' link has failed, the sum is made of whatever was there; then all values become NaN first.
struct CheckSum {
  void* values = nullptr;  // (count)
  DType dtype = DType::kBf16;
  int64_t count = 0;  // a multiple of 8
  // (1) in host memory: not 0 once the link has failed; null: it has no such word
  const uint32_t* link_failed = nullptr;
  uint64_t* nonfinite = nullptr;  // (1)
};

struct DeviceRanks {
  Status (*slots_of_ids)(int device, const SlotsOfIds& call, void* stream);
  Status (*sum_of_ranks)(int device, const SumOfRanks& call, void* stream);
  Status (*check_sum)(int device, const CheckSum& call, void* stream);
  // Puts an event into the stream: *event, or a new one if that is null. The stream must not be
  // capturing.
  Status (*set_event)(int device, void** event, void* stream);
  // Whether the device has reached the event. Does not wait and ends no capture. Any thread.
  Result<bool> (*event_reached)(int device, void* event);
  void (*drop_event)(int device, void* event);
  // A word in pinned host memory, 0, and its address on the device. The host sets it without a CUDA
  // call, which would block while another thread's launch waits for room in a stuck queue.
  Status (*make_host_word)(int device, uint32_t** word, uint32_t** on_device);
  void (*drop_host_word)(int device, uint32_t* word);
  // Calls body(argument) with the device as the thread's current one: for libraries that take it
  // from there.
  Status (*on_device)(int device, Status (*body)(void* argument), void* argument);
};

extern const DeviceRanks kCudaRanks;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

// The token that a message's next packet is made of. token < 0: a packet without slots.
struct PacketSource {
  int32_t token, rank, first_row;
};

// The header of a message of fixed capacity. It has the source rank's counts, whether they fit or
// not.
struct MessageHeader {
  int32_t tokens, rows;            // for this expert rank
  int32_t most_tokens, most_rank;  // for the expert rank that gets most
};

// Faults that expert ranks find in the messages' headers, in device memory. Whoever reads it clears
// it.
struct WireReport {
  uint64_t runs = 0;   // in which a rank had too many tokens for another
  uint64_t most = 0;   // the most that it was: tokens << 32 | source rank << 16 | expert rank
  uint64_t wrong = 0;  // packets with slots of other ranks, or rows beyond their message
};

// How a run's packets and rows are stored: the messages of all ranks one after another, each after
// its header. fixed: on the source rank all messages have `packets` packets and packets * top_k
// rows; on an expert rank each source rank's message has that rank's number. Otherwise messages
// have exactly the packets that there are, and no headers.
struct MessageLayout {
  PacketFormat packet;
  int64_t world = 0, packets = 0;
  bool fixed = false;
  int64_t header_bytes = 0;

  MessageLayout() = default;
  MessageLayout(const PacketFormat& packet_, int64_t world_, int64_t packets_, bool fixed_)
      : packet(packet_),
        world(world_),
        packets(packets_),
        fixed(fixed_),
        header_bytes(fixed ? static_cast<int64_t>(sizeof(MessageHeader)) : 0) {}
};

// counts (world, 2): tokens that have slots of each rank, and these slots.
struct CountPackets {
  const int32_t* slots = nullptr;          // (T, k); negative: none
  const int32_t* first_of_rank = nullptr;  // (world + 1) the first slot of each rank
  int64_t tokens = 0, top_k = 0, world = 0;
  int64_t* counts = nullptr;
};

// The packets of all messages, in the order of the tokens, and the offsets of the rows of their
// slots.
struct ScanPackets {
  MessageLayout layout;
  CountPackets counted;
  PacketSource* sources = nullptr;  // (packets of all messages)
  // (T, k) of those with a slot: its row; -1 if the message has no room
  int32_t* row_of_assignment = nullptr;
  std::byte* messages = nullptr;  // whose headers are written; null without them
  uint32_t* failed = nullptr;     // (1) = 0
};

struct PackPackets {
  MessageLayout layout;
  WireArray arrays[kWireArrays];           // of the source rank's tokens
  const int32_t* slots = nullptr;          // (T, k)
  const float* weights = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
  const PacketSource* sources = nullptr;   // (packets)
  int64_t packets = 0;
  std::byte* messages = nullptr;
};

// Packets that source ranks have written into this rank's memory, and their flags: [source
// rank][token], packet_stride from one rank's first to the next one's. In the expert rank's batch a
// source rank's tokens begin at first_of_source.
struct PeerMessages {
  int64_t packet_stride = 0;                     // 0: messages as a MessageLayout describes
  const uint32_t* flags = nullptr;               // (world, packet_stride)
  int32_t first_of_source[kMostPeers + 1] = {};  // (world + 1)
};

// Packets of all source ranks -> the expert rank's batch and the operands of its gemm1.
struct TakePackets {
  MessageLayout layout;
  const std::byte* messages = nullptr;
  ExpertRange range;         // its slots
  int32_t* ids = nullptr;    // (packets, k) the step's batch
  float* weights = nullptr;  // (packets, k)
  PeerMessages peers;
  PeerWait wait;  // for packets in peer memory
  // Without peer memory:
  int32_t* first_rows = nullptr;    // (packets) where a packet's rows begin among all that go back
  const int32_t* bounds = nullptr;  // (2, world + 1) first packet and first row of each source rank
  int64_t capacity = 0;             // of tokens from one rank to another, if they are in headers
  // (1) set if a source rank had too many tokens or is late, or a packet is wrong
  uint32_t* failed = nullptr;
  WireReport* report = nullptr;
};

// rows_out of the expert rank -> rows as they go back.
struct PackRows {
  PacketFormat packet;
  const void* rows_out = nullptr;              // (R)
  const int32_t* row_of_assignment = nullptr;  // (packets, k)
  const int32_t* ids = nullptr;                // (packets, k)
  const int32_t* first_rows = nullptr;         // (packets)
  int64_t packets = 0;
  std::byte* messages = nullptr;
  // expert_status's counts are added to source_status's.
  RunStatus* source_status = nullptr;
  const RunStatus* expert_status = nullptr;
};

// Extra inputs of combine if rows come from other ranks. If the run has failed, out is NaN and
// counted as such.
struct AwaitedRows {
  uint32_t* failed = nullptr;             // (1) why out is NaN; 0: it is not
  const uint32_t* link_failed = nullptr;  // (1) as CheckSum has it; null: peer memory
  // With peer memory, whose rows combine waits for:
  PeerWait wait;
  int32_t world = 1;
  const uint32_t* flags = nullptr;         // (T, k) of the rows; null: all have arrived
  const int32_t* slots = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
};

struct DevicePackets {
  Status (*count)(int device, const CountPackets& call, void* stream);
  Status (*scan)(int device, const ScanPackets& call, void* stream);
  Status (*pack)(int device, const PackPackets& call, void* stream);
  // take and route. expert: a step over the packets that arrived.
  Status (*take)(const StepContext& expert, const LayerSteps& steps, const TakePackets& call);
  Status (*pack_rows)(int device, const PackRows& call, void* stream);
  // values (count) -> to, by value: they may change when this returns.
  Status (*put)(int device, const int32_t* values, int64_t count, int32_t* to, void* stream);
};

extern const DevicePackets kCudaPackets;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe::internal
