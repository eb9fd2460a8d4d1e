// Device functions for a layer over ranks: ids to slots, totals over ranks, and the packets of
// all_to_all.
//
// Each function enqueues in a stream and returns. It allocates nothing, does not synchronize, and
// can be captured.
//
// A token starts on its source rank, which sends one packet to each expert rank (a rank that holds
// experts of the token):
//
//   packet   activations | slots (k) int32 | weights (k) fp32 | first_row int32, rounded up to 16
//            bytes
//
// - activations: all arrays that gemm1 reads in this format, one after another.
// - slots: -1 if the assignment belongs to another expert rank.
// - first_row: the number of rows that earlier packets of the message request, so that packets can
//   be processed independently. Unused with peer memory, which gives each row its own offset.
//
// Rows come back in packet order, and within a packet in the order of k.
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
inline constexpr int kWireArrays = 4;  // the maximum; unused entries have row_bytes = 0

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

// Offsets of the fields of a packet, and its size.
struct PacketFormat {
  int64_t top_k = 0;
  int64_t slots_at = 0, weights_at = 0, first_row_at = 0;  // multiples of 4
  int64_t bytes = 0;                                       // a multiple of 16
  int64_t row_bytes = 0;  // bytes of the row that comes back for each slot

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
// expert's slots are used round-robin: assignment k of token t has turn source + t + k
// (parallel/placement.h). -1 stays -1; any other invalid id becomes -2.
struct SlotsOfIds {
  const void* ids = nullptr;  // (tokens, top_k)
  DType ids_dtype = DType::kI64;
  int64_t tokens = 0, top_k = 0, num_experts = 0, source = 0;
  // (num_experts + 1) an expert's first index into slots_of_expert
  const int32_t* first_of_expert = nullptr;
  const int32_t* slots_of_expert = nullptr;  // (slots)
  int32_t* slots = nullptr;                  // (tokens, top_k)
  uint64_t* load = nullptr;                  // (num_experts)
};

// parts (ranks, count) fp32 -> out (count): added in rank order, rounded once to out's dtype.
struct SumOfRanks {
  const float* parts = nullptr;
  int64_t ranks = 0, count = 0;  // count: a multiple of 8
  void* out = nullptr;
  DType out_dtype = DType::kBf16;
};

// The last step of a sum over the ranks: *nonfinite = number of values that are NaN or Inf. If the
// ranks' link has failed, the sum is garbage, so all values are set to NaN first.
struct CheckReduced {
  void* values = nullptr;  // (count)
  DType dtype = DType::kBf16;
  int64_t count = 0;  // a multiple of 8
  // (1) in host memory: nonzero once the link has failed; null: the link has no such word
  const uint32_t* link_failed = nullptr;
  uint64_t* nonfinite = nullptr;  // (1)
};

struct DeviceRanks {
  Status (*slots_of_ids)(int device, const SlotsOfIds& call, void* stream);
  Status (*sum_of_ranks)(int device, const SumOfRanks& call, void* stream);
  Status (*check_reduced)(int device, const CheckReduced& call, void* stream);
  // Sets an event in the stream: *event, or a new one if that is null. The stream must not be
  // capturing.
  Status (*set_event)(int device, void** event, void* stream);
  // Whether the device has reached the event. Does not wait, does not end a capture, and may be
  // called from any thread.
  Result<bool> (*event_reached)(int device, void* event);
  void (*drop_event)(int device, void* event);
  // Allocates a word in pinned host memory, set to 0, and its device address. The host can set it
  // without a CUDA call; such a call would block while another thread's launch waits for room in a
  // stuck queue.
  Status (*make_host_word)(int device, uint32_t** word, uint32_t** on_device);
  void (*drop_host_word)(int device, uint32_t* word);
  // Calls body(argument) with `device` as the thread's current device, for libraries that use the
  // current device.
  Status (*on_device)(int device, Status (*body)(void* argument), void* argument);
};

// in builds with NVFP4_MOE_WITH_CUDA; all CUDA backends share it
extern const DeviceRanks kCudaRanks;

// The token of the next packet of a message. token < 0: a packet without slots.
struct PacketSource {
  int32_t token, rank, first_row;
};

// The header of a message of fixed capacity. It holds the source rank's counts, even if they exceed
// the capacity.
struct MessageHeader {
  int32_t tokens, rows;            // for this expert rank
  int32_t most_tokens, most_rank;  // for the expert rank that gets the most
};

// Faults that expert ranks find in message headers, in device memory. Reading the report clears it.
struct WireReport {
  uint64_t runs = 0;   // runs in which a rank had too many tokens for another
  uint64_t most = 0;   // the largest such number: tokens << 32 | source rank << 16 | expert rank
  uint64_t wrong = 0;  // packets with slots of other ranks, or rows beyond their message
};

// Layout of a run's packets and rows: the messages of all ranks one after another, each after its
// header. If fixed, all messages of a source rank have `packets` packets and packets * top_k rows;
// on an expert rank the number varies with the source rank. Otherwise messages contain exactly the
// packets that exist and have no headers.
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

// counts (world, 2): for each rank, the tokens that have slots there and the number of those slots.
struct CountPackets {
  const int32_t* slots = nullptr;          // (T, k); negative: no slot
  const int32_t* first_of_rank = nullptr;  // (world + 1) the first slot of each rank
  int64_t tokens = 0, top_k = 0, world = 0;
  int64_t* counts = nullptr;
};

// Orders the packets of all messages by token, and computes the row offset of each slot.
struct ScanPackets {
  MessageLayout layout;
  CountPackets counted;
  PacketSource* sources = nullptr;  // (packets of all messages)
  // (T, k) row of each assignment with a slot; -1 if the message has no room
  int32_t* row_of_assignment = nullptr;
  std::byte* messages = nullptr;  // writes their headers; null: no headers
  uint32_t* failed = nullptr;     // (1) set to 0
};

// The source rank's tokens, as packets are made of them.
struct TokensToSend {
  WireArray arrays[kWireArrays];
  const int32_t* slots = nullptr;          // (T, k)
  const float* weights = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
};

struct PackPackets {
  MessageLayout layout;
  TokensToSend from;
  const PacketSource* sources = nullptr;  // (packets)
  int64_t packets = 0;
  std::byte* messages = nullptr;
};

// Packets, with their flags, that source ranks have written into this rank's memory: [source
// rank][token], packet_stride packets apart per source rank. In the expert rank's batch, the tokens
// of a source rank begin at first_of_source.
struct PeerMessages {
  int64_t packet_stride = 0;                     // 0: messages laid out as in MessageLayout
  const uint32_t* flags = nullptr;               // (world, packet_stride)
  int32_t first_of_source[kMostPeers + 1] = {};  // (world + 1)
};

// Packets of all source ranks -> the expert rank's batch and gemm1 operands.
struct UnpackPackets {
  MessageLayout layout;
  const std::byte* messages = nullptr;
  ExpertRange range;         // slots of this rank
  int32_t* ids = nullptr;    // (packets, k) ids of the step's batch
  float* weights = nullptr;  // (packets, k)
  PeerMessages peers;
  PeerWait wait;  // for packets in peer memory
  // Without peer memory:
  // (packets) first row of each packet, counted over all rows that go back
  int32_t* first_rows = nullptr;
  const int32_t* bounds = nullptr;  // (2, world + 1) first packet and first row of each source rank
  int64_t capacity = 0;  // maximum tokens from one rank to another, if messages have headers
  // (1) set if a source rank had too many tokens or is late, or if a packet is wrong
  uint32_t* failed = nullptr;
  WireReport* report = nullptr;
};

// rows_out of the expert rank -> rows in the order in which they go back.
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

// Extra inputs of combine if rows come from other ranks. If the run has failed, all of out is NaN
// and counted as nonfinite.
struct AwaitedRows {
  uint32_t* failed = nullptr;             // (1) why out is NaN; 0: no failure
  const uint32_t* link_failed = nullptr;  // (1) see CheckReduced; null: peer memory
  // Only with peer memory, when combine waits for the rows:
  PeerWait wait;
  int32_t world = 1;
  const uint32_t* flags = nullptr;         // (T, k) flags of the rows; null: all have arrived
  const int32_t* slots = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
};

struct DevicePackets {
  Status (*count)(int device, const CountPackets& call, void* stream);
  Status (*scan)(int device, const ScanPackets& call, void* stream);
  Status (*pack)(int device, const PackPackets& call, void* stream);
  // unpack and route. expert: a step whose batch is the packets that arrived.
  Status (*unpack)(const StepContext& expert, const LayerSteps& steps, const UnpackPackets& call);
  Status (*pack_rows)(int device, const PackRows& call, void* stream);
  // values (count) -> to. Values are copied at the call and may change afterwards.
  Status (*write_words)(int device, const int32_t* values, int64_t count, int32_t* to,
                        void* stream);
};

// in builds with NVFP4_MOE_WITH_CUDA; all CUDA backends share it
extern const DevicePackets kCudaPackets;

}  // namespace nvfp4_moe::internal
