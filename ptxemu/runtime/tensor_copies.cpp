// Tensor copies: a box of a tensor of up to five dimensions to and from shared memory, with
// swizzles and bounds.
#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/control.h"
#include "runtime/tensor_map.h"

namespace ptxemu {
namespace {

using Coordinates = std::array<int32_t, 5>;

TensorMap checked_map(Thread* T, uint64_t address, int rank) {
  if (address % 64) fault(T, "a tensor map: its address must be a multiple of 64");
  TensorMap map;
  std::memcpy(&map, T->generic_at(address, 128), sizeof map);
  if (T->order) check_read(T, T->generic_at(address, 128), 128, true);
  if (map.magic != TensorMap::kMagic) fault(T, "what the copy takes for a tensor map is none");
  if (map.rank != rank) fault(T, "a tensor map of another number of dimensions");
  if (map.interleave) fault(T, "tensor maps with interleaving are not supported");
  if (map.type == 15) fault(T, "tensor maps of 6-bit elements are not supported");
  return map;
}

// Calls of(row of the box, its first byte in the tensor or null if the row lies outside).
template <class F>
void each_row(const TensorMap& map, const Coordinates& at, F of) {
  uint32_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (uint32_t row = 0; row < rows; ++row) {
    uint32_t rest = row;
    uint64_t address = map.address;
    bool inside = true;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t x = int64_t{at[i]} + rest % map.box[i];
      rest /= map.box[i];
      inside = inside && x >= 0 && x < static_cast<int64_t>(map.dim(i));
      address += static_cast<uint64_t>(x) * map.strides[i - 1];
    }
    of(row, inside ? reinterpret_cast<uint8_t*>(address) : nullptr);
  }
}

// The elements [low, high) of a box's row that are inside the tensor.
std::pair<int64_t, int64_t> inside_range(const TensorMap& map, const Coordinates& at) {
  const int64_t low = std::max<int64_t>(0, -int64_t{at[0]});
  const int64_t high = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.dim(0)) - at[0]);
  if (planted(Fault::tensor_bounds)) return {low, map.box[0]};
  return {low, std::max(low, high)};
}

uint8_t nibble(const uint8_t* row, int64_t element) {
  return row[element / 2] >> (element % 2 * 4) & 15;
}
void put_nibble(uint8_t* row, int64_t element, uint8_t value) {
  uint8_t& byte = row[element / 2];
  byte = static_cast<uint8_t>(element % 2 ? (byte & 15) | value << 4 : (byte & 0xf0) | value);
}
// The position of element e of a spread row: 16 elements are in the low 8 of 16 bytes.
int64_t spread_nibble(int64_t e) { return e / 16 * 32 + e % 16; }

// Copies the elements of a box's row that are inside the tensor to a line of shared memory, or
// back.
void copy_row(const TensorMap& map, const Coordinates& at, uint8_t* row, uint8_t* line, bool load) {
  const auto [low, high] = inside_range(map, at);
  if (map.element_bits() == 4) {
    for (int64_t e = low; e < high; ++e) {
      const int64_t in_row = at[0] + e, in_line = map.spread() ? spread_nibble(e) : e;
      if (load)
        put_nibble(line, in_line, nibble(row, in_row));
      else
        put_nibble(row, in_row, nibble(line, in_line));
    }
    return;
  }
  const uint32_t bytes = map.element_bits() / 8;
  uint8_t *in_row = row + (at[0] + low) * bytes, *in_line = line + low * bytes;
  std::memcpy(load ? in_line : in_row, load ? in_row : in_line,
              static_cast<size_t>((high - low) * bytes));
}

// Adds the elements instead. The map has their type (CUtensorMapDataType).
void add_row(const TensorMap& map, const Coordinates& at, uint8_t* row, const uint8_t* line) {
  const auto [low, high] = inside_range(map, at);
  const uint32_t bytes = map.element_bits() / 8;
  for (int64_t e = low; e < high; ++e) {
    uint8_t* to = row + (at[0] + e) * bytes;
    const uint8_t* from = line + e * bytes;
    switch (map.type) {
      case 2:
      case 3: atomic_add<uint32_t>(to, read<uint32_t>(from)); break;
      case 4:
      case 5: atomic_add<uint64_t>(to, read<uint64_t>(from)); break;
      case 6: atomic_add_f16(to, read<uint16_t>(from)); break;
      case 7: atomic_add_f32(to, read<uint32_t>(from)); break;
      default: atomic_add_bf16(to, read<uint16_t>(from)); break;
    }
  }
}
bool can_add(const TensorMap& map) {
  return (map.type >= 2 && map.type <= 7) || map.type == 9;  // integers, f16, f32, bf16
}

uint32_t swizzle_of(const TensorMap& map) {
  if (planted(Fault::tensor_swizzle_64) && map.swizzle == 2) return 1;
  return planted(Fault::tensor_swizzle) ? 0 : map.swizzle;
}

// Calls of(first byte in the tensor, bytes) for each row of the box that is inside it.
template <class F>
void each_row_inside(const TensorMap& map, const Coordinates& at, F of) {
  const auto [low, high] = inside_range(map, at);
  const int64_t first = (at[0] + low) * map.element_bits() / 8,
                end = (at[0] + high) * map.element_bits() / 8;
  each_row(map, at, [&, first = first, end = end](uint32_t, const uint8_t* row) {
    if (row && end > first) of(row + first, static_cast<uint32_t>(end - first));
  });
}

void load_box(const TensorMap& map, const Coordinates& at, uint8_t* shared, uint32_t to) {
  const uint32_t bytes = map.row_bytes();
  std::vector<uint8_t> line(bytes + 16);
  each_row(map, at, [&](uint32_t row, uint8_t* from) {
    std::fill(line.begin(), line.end(), 0);
    if (from) copy_row(map, at, from, line.data(), true);
    for (uint32_t i = 0; i < bytes; i += 16)
      std::memcpy(shared + swizzled(to + row * bytes + i, swizzle_of(map)), line.data() + i,
                  std::min(16u, bytes - i));
  });
}

}  // namespace

void tensor_load(Thread* T, int rank, uint64_t to, uint64_t map_address, const int32_t* at,
                 uint64_t barrier, bool multicast, uint32_t mask, bool pair) {
  const TensorMap map = checked_map(T, map_address, rank);
  if (to % 128) fault(T, "a tensor copy: the address in shared memory must be a multiple of 128");
  T->shared_at(to, 1);
  T->shared_at(to + map.box_bytes() - 1, 1);
  T->shared_at(barrier, 8);
  Coordinates from{};
  std::copy(at, at + rank, from.begin());
  Cluster* cluster = T->cta->cluster;
  if (T->order)
    each_row_inside(map, from,
                    [&](const uint8_t* row, uint32_t bytes) { check_bulk_source(T, row, bytes); });
  // The arrival in each cta is a separate event.
  for (uint32_t r = 0; r < cluster->ctas.size(); ++r) {
    if (multicast ? !(mask >> r & 1) : r != 0) continue;
    uint32_t place = static_cast<uint32_t>(to), signal = static_cast<uint32_t>(barrier);
    if (multicast) {
      // For a pair of ctas, the barrier of the cta that the address names counts the bytes of both.
      const uint32_t signalled = pair && !planted(Fault::tensor_pair_signal)
                                     ? (r & ~1u) | (signal >> kSharedOffsetBits & 1)
                                     : r;
      place = (place & 0xffffff) | r << kSharedOffsetBits;
      signal = (signal & 0xffffff) | signalled << kSharedOffsetBits;
    }
    uint8_t* shared = cluster->ctas[place >> kSharedOffsetBits]->shared;
    enqueue_delivery(T, place, nullptr, map.box_bytes(), signal, map.box_bytes(),
                     [=](uint8_t*) { load_box(map, from, shared, place & 0xffffff); });
  }
}

void tensor_store(Thread* T, int rank, uint64_t map_address, const int32_t* at, uint64_t source,
                  bool add) {
  const TensorMap map = checked_map(T, map_address, rank);
  if (add && !can_add(map)) fault(T, "cp.reduce: elements of this tensor map cannot be added");
  if (planted(Fault::tensor_reduce_stores)) add = false;
  if (source % 128)
    fault(T, "a tensor copy: the address in shared memory must be a multiple of 128");
  T->shared_at(source, 1);
  T->shared_at(source + map.box_bytes() - 1, 1);
  Coordinates to{};
  std::copy(at, at + rank, to.begin());
  const uint8_t* shared = T->shared;
  if (T->order) {
    check_bulk_store(T, T->shared_at(source, 1), map.box_bytes(), false);
    each_row_inside(map, to, [&](const uint8_t* row, uint32_t bytes) {
      check_bulk_store(T, row, bytes, true);
    });
  }
  T->open_bulk.push_back([=] {
    const uint32_t bytes = map.row_bytes(), from = static_cast<uint32_t>(source) & 0xffffff;
    std::vector<uint8_t> line(bytes + 16);
    each_row(map, to, [&](uint32_t row, uint8_t* into) {
      if (!into) return;
      for (uint32_t i = 0; i < bytes; i += 16)
        std::memcpy(line.data() + i, shared + swizzled(from + row * bytes + i, swizzle_of(map)),
                    std::min(16u, bytes - i));
      if (add)
        add_row(map, to, into, line.data());
      else
        copy_row(map, to, into, line.data(), false);
    });
  });
}

void tensor_map_replace(Thread* T, uint8_t* at, TensorMapField field, uint32_t ordinal,
                        uint64_t value) {
  if (ordinal > 4) fault(T, "tensormap.replace: expected a dimension from 0 to 4");
  TensorMap map;
  std::memcpy(&map, at, sizeof map);
  switch (field) {
    case TensorMapField::kGlobalAddress: map.address = value; break;
    case TensorMapField::kGlobalDim:
      if (planted(Fault::tensor_map_dimension)) break;
      map.dims[ordinal] = static_cast<uint32_t>(value);
      break;
    case TensorMapField::kGlobalStride: map.strides[ordinal & 3] = value; break;
    case TensorMapField::kBoxDim: map.box[ordinal] = static_cast<uint16_t>(value); break;
    case TensorMapField::kElementStride:
      map.element_strides[ordinal] = static_cast<uint8_t>(value);
      break;
    case TensorMapField::kRank: map.rank = static_cast<uint8_t>(value + 1); break;
  }
  std::memcpy(at, &map, sizeof map);
  if (T->order) check_write(T, at, sizeof map);
}

void tensor_map_copy(Thread* T, uint64_t to, uint64_t from) {
  std::memcpy(T->generic_at(to, 128), T->shared_at(from, 128), 128);
  meet(T, 0, "aligned tensormap.cp_fenceproxy", nullptr, true, [=](void**, uint32_t) {
    if (!T->order) return;
    check_collective(T, T->shared_at(from, 128), 128, false);
    check_collective(T, T->generic_at(to, 128), 128, true);
  });
}

}  // namespace ptxemu
