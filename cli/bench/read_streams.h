// Reads memory on one thread. Included in a separate namespace for each target region; kVectorBytes
// is the length of its registers.

using Words __attribute__((vector_size(kVectorBytes), may_alias)) = uint64_t;

// Reads kStreams neighbouring parts of stream_bytes (a multiple of 64) concurrently and prefetches
// kAheadBytes ahead unless that is 0. The returned sum keeps the reads from being optimized away.
template <int kStreams, int kAheadBytes>
uint64_t read_streams(const std::byte* data, int64_t stream_bytes) {
  Words sums[kStreams] = {};
  for (int64_t i = 0; i < stream_bytes; i += 64) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      const std::byte* line = data + s * stream_bytes + i;
      if (kAheadBytes > 0) __builtin_prefetch(line + kAheadBytes);
#pragma GCC unroll 4
      for (int v = 0; v < 64; v += kVectorBytes)
        sums[s] += *reinterpret_cast<const Words*>(line + v);
    }
  }
  uint64_t sum = 0;
  for (const Words& words : sums)
    for (size_t j = 0; j < kVectorBytes / sizeof(uint64_t); ++j) sum += words[j];
  return sum;
}

// The fastest way to read differs between hosts: with hardware or software prefetching, in one
// stream or many.
constexpr ReadShape kShapes[] = {{1, read_streams<1, 2048>},
                                 {4, read_streams<4, 2048>},
                                 {8, read_streams<8, 2048>},
                                 {4, read_streams<4, 0>}};
