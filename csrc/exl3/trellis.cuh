// Trellis decode: one 16x16 tile of 256*K packed bits to one m16n8k16 A fragment of the transposed weights.
//
// A tile is a ring of 256*K bits. Lane t of a warp owns positions 8t..8t+7; the 16-bit state of position 8t+j is the
// ring's bits [S(j) - 16, S(j)) counted from bit 8tK, S(j) being the bits that positions 8t..8t+j add. So a lane needs
// 16 + 8K bits at most, which overlap its neighbours' by up to 13.
//
// The integer pipe bounds this code, not memory: docs and counts are in README.md. Two choices follow.
//  * A lane aligns its bits once for each group of states that lie within 32 bits, then every state is one constant
//    shift (which the compiler may issue as a multiply, on the other pipe) and one byte pick. States at equal offsets
//    modulo 8 share the shift; states on byte boundaries need none.
//  * Rates whose lanes all start on the same bit of a word (4 and 8) need no alignment at all.
#pragma once

#include <type_traits>
#include <utility>

#include "ptx.cuh"

namespace exl3 {

// f(0), f(1), ... with the index as a type, so that the geometry below is worked out by the compiler.
template <class F, int... kIndex>
__device__ __forceinline__ void unroll_indices(F&& f, std::integer_sequence<int, kIndex...>) {
  (f(std::integral_constant<int, kIndex>{}), ...);
}
template <int kCount, class F>
__device__ __forceinline__ void unroll(F&& f) {
  unroll_indices(f, std::make_integer_sequence<int, kCount>{});
}

enum class Codebook : int { k3inst = 0, kMcg = 1, kMul1 = 2 };

// Geometry of a rate, given as 2K so that half rates are whole numbers. All in bits unless named otherwise.
template <int kRate2>
struct Rate {
  static_assert(kRate2 >= 2 && kRate2 <= 16, "rates are 1 to 8 bits a weight");
  static constexpr int kTileBytes = 16 * kRate2;
  static constexpr int kTileWords = 4 * kRate2;
  static constexpr int kLaneBits = 4 * kRate2;
  static constexpr bool kSameOffset = kLaneBits % 32 == 0;

  // S(j): bits added by positions 0..j of a lane; odd positions of a half rate add one bit more than even ones.
  __host__ __device__ static constexpr int end(int j) {
    return (j + 1) * (kRate2 / 2) + (kRate2 % 2) * ((j + 1) / 2);
  }
  // States are split greedily into groups whose windows fit one aligned word; group_of(j) counts from 0.
  __host__ __device__ static constexpr int group_of(int j) {
    int group = 0, first = 0;
    for (int i = 1; i <= j; ++i)
      if (end(i) - end(first) > 16) first = i, ++group;
    return group;
  }
  __host__ __device__ static constexpr int groups() { return group_of(7) + 1; }
  __host__ __device__ static constexpr int last_in(int group) {
    int j = 7;
    while (group_of(j) > group) --j;
    return j;
  }
  // Bit where a group's word starts, counted like end() - 16 (so the lane's first window starts at end(0)).
  // The earliest legal start: it lets most groups share the words loaded for the group before.
  __host__ __device__ static constexpr int base(int group) {
    const int earliest = end(last_in(group)) - 16;
    return earliest < 0 ? 0 : earliest;
  }
  // Offset of a group's start within its word, for one lane.
  __host__ __device__ static constexpr int word_offset(int group, int lane) {
    return (lane * kLaneBits - 16 + base(group) + 64) % 32;
  }
  // The group whose loaded word pair serves this group: itself, or an earlier one if no lane runs past the pair.
  __host__ __device__ static constexpr int pair_of(int group) {
    int owner = 0;
    for (int g = 1; g <= group; ++g) {
      bool fits = true;
      for (int lane = 0; lane < 32; ++lane)
        if (word_offset(owner, lane) + base(g) - base(owner) > 32) fits = false;
      if (!fits) owner = g;
    }
    return owner;
  }
  __host__ __device__ static constexpr int pairs_before(int group) {
    int count = 0;
    for (int g = 0; g < group; ++g) count += pair_of(g) == g;
    return count;
  }
  __host__ __device__ static constexpr int pairs() { return pairs_before(groups()); }
};

// What a lane must know of its place in a tile; computed once, outside every loop.
template <int kRate2>
struct LanePlace {
  using R = Rate<kRate2>;
  uint32_t word[R::groups()][2];  // byte offsets within a tile of the two words that a group owns
  uint32_t shift[R::groups()];    // where the group's word starts in its pair, bits
  uint32_t ones[2];               // where this lane's part of add_up's matrix is not 0, for words of even and odd k: ~0

  __device__ __forceinline__ explicit LanePlace(int lane) {
    unroll<R::groups()>([&](auto group) {
      constexpr int g = decltype(group)::value, owner = R::pair_of(g), base = R::base(owner);
      constexpr int extra = R::base(g) - base, same = R::word_offset(owner, 0);
      const uint32_t start = static_cast<uint32_t>(lane * R::kLaneBits - 16 + base + 32 * R::kTileWords);
      word[g][0] = start / 32 % R::kTileWords * 4;
      word[g][1] = (start / 32 + 1) % R::kTileWords * 4;
      shift[g] = (R::kSameOffset ? same : start % 32) + extra;
      keep_in_register(word[g][0]);
      keep_in_register(word[g][1]);
      if constexpr (!R::kSameOffset) keep_in_register(shift[g]);
    });
    ones[0] = lane / 4 == lane % 4 * 2 ? ~0u : 0;
    ones[1] = lane / 4 == lane % 4 * 2 + 1 ? ~0u : 0;
  }
};

// The 16 bits at bit kOffset (most significant first) of a word, zero-extended. kSpread: some of them by the pipe that
// multiplies, for kernels whose integer pipe is the busier one.
template <int kOffset, bool kSpread>
__device__ __forceinline__ uint32_t window(uint32_t word) {
  static_assert(kOffset >= 0 && kOffset <= 16, "a window lies within its word");
  constexpr uint32_t kPick = kOffset / 8 == 0 ? 0x4432 : kOffset / 8 == 1 ? 0x4421 : 0x4410;
  if constexpr (kSpread && kOffset < 8) return dot_upper_half(word << kOffset);
  return byte_pick(word << (kOffset % 8), 0, kPick);
}

// The words of a tile that hold a lane's states: a pair for each group that owns one.
template <int kRate2>
using Words = uint32_t[Rate<kRate2>::pairs()][2];

// load(word offset in bytes) reads a word of the tile.
template <int kRate2, class Load>
__device__ __forceinline__ void load_words(const Load& load, const LanePlace<kRate2>& place, Words<kRate2>& words) {
  using R = Rate<kRate2>;
  unroll<R::groups()>([&](auto group) {
    constexpr int g = decltype(group)::value;
    if constexpr (R::pair_of(g) == g) {
      words[R::pairs_before(g)][0] = load(place.word[g][0]);
      words[R::pairs_before(g)][1] = load(place.word[g][1]);
    }
  });
}

// The eight states of a lane in one tile.
template <int kRate2, bool kSpread = false>
__device__ __forceinline__ void states_of(const Words<kRate2>& words, const LanePlace<kRate2>& place, uint32_t (&state)[8]) {
  using R = Rate<kRate2>;
  unroll<R::groups()>([&](auto group) {
    constexpr int g = decltype(group)::value, pair = R::pairs_before(R::pair_of(g));
    const uint32_t aligned = funnel_left(words[pair][0], words[pair][1], place.shift[g]);
    unroll<8>([&](auto position) {
      constexpr int j = decltype(position)::value;
      if constexpr (R::group_of(j) == g) state[j] = window<R::end(j) - R::base(g), kSpread>(aligned);
    });
  });
}
template <int kRate2, bool kSpread = false, class Load>
__device__ __forceinline__ void load_states(const Load& load, const LanePlace<kRate2>& place, uint32_t (&state)[8]) {
  Words<kRate2> words;
  load_words<kRate2>(load, place, words);
  states_of<kRate2, kSpread>(words, place, state);
}

// A state's word: the weight is the sum of its fp16 halves, or, for mul1, follows from the sum of its bytes.
template <Codebook kBook>
__device__ __forceinline__ uint32_t expand(uint32_t state) {
  if constexpr (kBook == Codebook::kMul1) return state * 0x83DCD12Du;
  else if constexpr (kBook == Codebook::kMcg) return and_xor<0x8fff8fffu, 0x3b603b60u>(state * 0xCBAC1FEDu);
  else return and_xor<0x8fff8fffu, 0x3b603b60u>(state * 89226354u + 64248484u);
}

// Two states to two fp16 weights in one word, the first in the low half. Bit-exact with the format's definition.
template <Codebook kBook>
__device__ __forceinline__ uint32_t decode_pair(uint32_t s0, uint32_t s1) {
  const uint32_t x0 = expand<kBook>(s0), x1 = expand<kBook>(s1);
  if constexpr (kBook == Codebook::kMul1) {
    // (1024 + byte sum) as fp16 is 0x6400 | sum: the sum fits the ten mantissa bits.
    return fma_half2(byte_sum(x1, 0) * 65536u + byte_sum(x0, 0x64006400u), 0x1eee1eeeu, 0xc931c931u);
  } else {
    // Two swizzled adds and one pick keep the integer pipe lighter than two picks and one add.
    return byte_pick(add_halves(x0), add_halves(x1), 0x5410);
  }
}

// One tile as the A fragment (weights transposed: rows are output columns n, columns are inputs k) of mma_m16n8k16.
template <Codebook kBook>
__device__ __forceinline__ void decode_states(const uint32_t (&s)[8], uint32_t (&a)[4]) {
  a[0] = decode_pair<kBook>(s[0], s[1]);
  a[1] = decode_pair<kBook>(s[4], s[5]);
  a[2] = decode_pair<kBook>(s[2], s[3]);
  a[3] = decode_pair<kBook>(s[6], s[7]);
}
template <Codebook kBook, int kRate2, class Load>
__device__ __forceinline__ void decode_tile(const Load& load, const LanePlace<kRate2>& place, uint32_t (&a)[4]) {
  uint32_t s[8];
  load_states<kRate2>(load, place, s);
  decode_states<kBook>(s, a);
}

// Words of rows g and g + 8 at an even k, then at the next, to the weights of the two rows. The tensor cores add: a matrix
// of zeros and ones puts the sum of lane c's word of even k into column 2c, that of odd k into 2c + 1. They round once, as
// the format does, so the weights are exact.
template <Codebook kBook>
__device__ __forceinline__ void add_up(const uint32_t (&word)[4], const uint32_t (&ones)[2], uint32_t& low, uint32_t& high) {
  if constexpr (kBook == Codebook::kMul1) {
    // Twice a byte sum as the bits of fp16 is the sum in units of 2^-23, and the format's (1024 + sum) * c - 10.3828125 is
    // sum * c - 3.453125, rounded once, c = 0x1eee.
    uint32_t twice[4];
    mma_m16n8k32_bytes(twice, word, ones[0] & 0x02020202u, ones[1] & 0x02020202u);
    low = fma_half2(twice[1] * 65536u + twice[0], 0x7aee7aeeu, 0xc2e8c2e8u);
    high = fma_half2(twice[3] * 65536u + twice[2], 0x7aee7aeeu, 0xc2e8c2e8u);
  } else {
    uint32_t sum[2];
    mma_m16n8k16_half(sum, word, ones[0] & 0x3c003c00u, ones[1] & 0x3c003c00u);
    low = sum[0], high = sum[1];
  }
}

// The same as decode_tile for kernels that leave the tensor cores idle: 10 instructions less.
template <Codebook kBook, int kRate2, class Load>
__device__ __forceinline__ void decode_tile_by_tensor_cores(const Load& load, const LanePlace<kRate2>& place,
                                                            uint32_t (&a)[4]) {
  uint32_t s[8];
  load_states<kRate2>(load, place, s);
  const uint32_t left[4] = {expand<kBook>(s[0]), expand<kBook>(s[4]), expand<kBook>(s[1]), expand<kBook>(s[5])};
  const uint32_t right[4] = {expand<kBook>(s[2]), expand<kBook>(s[6]), expand<kBook>(s[3]), expand<kBook>(s[7])};
  add_up<kBook>(left, place.ones, a[0], a[1]);
  add_up<kBook>(right, place.ones, a[2], a[3]);
}

// The same as two B fragments of mma_m16n8k16 (k down the tile's rows), of columns 0-7 and 8-15: what one product of
// words gives lies as one of them does.
template <Codebook kBook, int kRate2, class Load>
__device__ __forceinline__ void decode_tile_for_columns(const Load& load, const LanePlace<kRate2>& place,
                                                        uint32_t (&b)[2][2]) {
  uint32_t s[8];
  load_states<kRate2>(load, place, s);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word[4] = {expand<kBook>(s[4 * i]), expand<kBook>(s[4 * i + 2]), expand<kBook>(s[4 * i + 1]),
                              expand<kBook>(s[4 * i + 3])};
    add_up<kBook>(word, place.ones, b[i][0], b[i][1]);
  }
}

// Where a tile's words are read from.
struct SharedTile {
  SharedAddress tile;
  __device__ __forceinline__ uint32_t operator()(uint32_t offset) const { return load_shared_32(tile + offset); }
};
struct GlobalTile {
  const unsigned char* tile;
  __device__ __forceinline__ uint32_t operator()(uint32_t offset) const {
    return *reinterpret_cast<const uint32_t*>(tile + offset);
  }
};

}  // namespace exl3
