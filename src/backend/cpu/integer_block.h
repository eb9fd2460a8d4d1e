// Rows of W4A16 as exact integers: the operands for single rows (kernels.h) of "avx2", "avx512vnni"
// and "amx".
//
// Included like rows.h, after it, by integer_block_avx2.h and integer_block_avx512.h, which define
// the operations that are used here. The activations of a block are integers times one power of
// two, the step. If those of each 8-half add up to less than 2^24 / 12 in magnitude, fp32 in the
// order of float_small_batch.h rounds nothing within a chain: every product with a weight 2w and
// every partial result is an integer below 2^24. Then their order does not matter, and only adding
// the two chains rounds, as converting that integer does. So 8-bit dot products of the integers'
// bytes give the bits of fp32.

// A block of 16 activations: x = (bytes[0] + 2^8 bytes[1] + 2^16 bytes[2]) * step * 2^-7.
struct IntegerBlock {
  int8_t bytes[3][16];
  int32_t count;  // bytes to multiply by, 2 or 3; or 0, if fp32 has to multiply the block
  int32_t bias;   // -12 times the sum of the integers, for weights 2w + 12
  float step;     // a power of two; it also holds the 2^8 of small_scales and the 1/2 of 2w
};

constexpr int64_t kIntegerChunkBytes = kBlocksPerChunk * static_cast<int64_t>(sizeof(IntegerBlock));

inline I low_byte(I a) { return shift_right_signed<24>(shift_left<24>(a)); }

inline void integer_block(F values, IntegerBlock& block) {
  constexpr int kBits = 21;  // larger ones exceed kMostSum
  block = {};
  const int32_t top = max_lane(bits(values) & splat(0x7F800000));  // the largest power of two
  // Far from 2^-126 and 2^127, so that every step and every result is a normal number.
  if (top < (127 - 64) << 23 || top > (127 + 64) << 23) return;
  const float step = std::bit_cast<float>(top - ((kBits - 1) << 23));
  const F scaled = values * splat(1.0f / step);
  I integers = bits(scaled + splat(0x1.8p23f)) - splat(0x4B400000);
  const F rounded = to_float(integers);
  if ((lanes_of(rounded > scaled) | lanes_of(scaled > rounded)) != 0) return;
  const int zeros = std::countr_zero(or_of(integers));
  integers = shift_right_signed(integers, zeros);
  constexpr int32_t kMostSum = ((1 << 24) - 1) / 12;
  if (larger_half(magnitudes(integers)) > kMostSum) return;

  const I low = low_byte(integers), upper = shift_right_signed<8>(integers - low);
  const I middle = low_byte(upper), high = shift_right_signed<8>(upper - middle);
  const I parts[3] = {low, middle, high};
  for (int n = 0; n < 3; ++n) {
    uint8_t bytes[kLanes];
    store_bytes(bytes, parts[n] & splat(0xFF));
    std::memcpy(block.bytes[n], bytes, sizeof bytes);
  }
  block.count = or_of(high) == 0 ? 2 : 3;
  block.bias = -12 * sum_of(integers);
  block.step = step * std::bit_cast<float>((127 + 7 + zeros) << 23);
}

// Writes `count` blocks. values(b) returns the 16 activations of block b.
template <class Values>
void write_integer_blocks(int64_t count, const Values& values, IntegerBlock* blocks) {
  int64_t two_bytes = 0;
  for (int64_t b = 0; b < count; ++b) {
    integer_block(values(b), blocks[b]);
    two_bytes += blocks[b].count == 2 ? 1 : 0;
  }
  // If two and three bytes change often, mispredicted branches cost more than a third byte that is
  // 0.
  if (4 * two_bytes >= 3 * count) return;
  for (int64_t b = 0; b < count; ++b)
    if (blocks[b].count == 2) blocks[b].count = 3;
}

// Writes the integers of a row of fp32_operands, kFloatsChunkBytes per chunk, after it.
template <int64_t kFloatsChunkBytes>
void integer_blocks_of_floats(int64_t k, std::byte* row) {
  const float* values = reinterpret_cast<const float*>(row);  // (chunks * 64)
  write_integer_blocks(
      chunks_of(k) * kBlocksPerChunk, [&](int64_t b) { return load(values + b * kBlockElems); },
      reinterpret_cast<IntegerBlock*>(row + chunks_of(k) * kFloatsChunkBytes));
}
