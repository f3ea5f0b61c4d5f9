// Moves tokens between arrays and pages, and between pages: append, gather, copy and demotion.
//
// Sixteen lanes take one group of 64 numbers of a token and head, four neighbouring dims (a quad)
// each: see formats/page_layout.h for what lies where, and formats/page_layout.cpp for the rounding,
// which is the same here to the last bit.
//
// Compiled at run time with MAX_MOVES, the moves that one launch can take.
#include "page_format.cuh"

/// What moves of one kind have in common. Strides are in numbers, of the array [heads, tokens, dims]
/// among the two ends, if any is one.
struct Kind {
  u64 head_stride, token_stride, dim_stride;
  int from_format, to_format;
  int from_page, to_page;
  int n_heads, head_dim;
};

/// Tokens from_token .. from_token + n_tokens of one end become those from to_token on of the other.
struct Move {
  u64 from;
  u64 to;
  int from_token;
  int to_token;
  int n_tokens;
  int kind;
};

struct Moves {
  int block_size;
  Kind kinds[MAX_MOVES < 8 ? MAX_MOVES : 8];
  Move moves[MAX_MOVES];
};

/// Tokens first_token .. of a sequence's pages become the last rows of an array; rows before them
/// become zeros.
struct Gather {
  u64 pages;
  u64 to;
  Kind kind;
  int block_size;
  int first_token;
  int n_padding;
  int n_rows;
};

/// New entries of page tables.
struct Entries {
  int n;
  u64 tables[MAX_MOVES];
  int indices[MAX_MOVES];
  u64 values[MAX_MOVES];
};

/// Four neighbouring dims of one token and head, and what part of them there is.
struct Quad {
  int head, token, group, lane, dim, n;

  /// Groups of a token lie side by side, then tokens, then heads.
  __device__ Quad(const Kind& kind, int item, int n_tokens, bool exists) {
    const int groups = scale_groups(kind.head_dim);
    lane = threadIdx.x & 15;
    group = exists ? item % groups : 0;
    token = exists ? item / groups % n_tokens : 0;
    head = exists ? item / groups / n_tokens : 0;
    dim = group * kGroup + lane * 4;
    n = exists ? max(0, min(4, kind.head_dim - dim)) : 0;
  }
};

__device__ __forceinline__ float read_float(int format, u64 at, u64 index) {
  if (format == kFp32) return reinterpret_cast<const float*>(at)[index];
  const u16 bits = reinterpret_cast<const u16*>(at)[index];
  return format == kFp16 ? half_to_float(bits) : bf16_to_float(bits);
}

__device__ __forceinline__ void write_float(int format, u64 at, u64 index, float value) {
  if (format == kFp32) {
    reinterpret_cast<float*>(at)[index] = value;
  } else {
    reinterpret_cast<u16*>(at)[index] =
        format == kFp16 ? float_to_half(value) : float_to_bf16(value);
  }
}

/// Where the codes of a token and the scale of one of its groups lie.
struct CodePlace {
  u64 words;
  int word_stride;
  u64 scale, minimum;

  __device__ CodePlace(u64 head, int format, int block_size, int head_dim, int token, int group) {
    const int lanes = block_size & 1 ? 1 : min(16, block_size & -block_size);
    words = head + (u64(token / lanes) * code_words(format, head_dim) * lanes + token % lanes) * 4;
    word_stride = lanes * 4;
    const u64 at = (u64(group) * block_size + token) * 2;
    scale = head + scales_offset(format, block_size, head_dim) + at;
    minimum = scale + u64(scale_groups(head_dim)) * block_size * 2;
  }
  __device__ u32 word(int index) const {
    return *reinterpret_cast<const u32*>(words + u64(index) * word_stride);
  }
  __device__ void set_word(int index, u32 value) const {
    *reinterpret_cast<u32*>(words + u64(index) * word_stride) = value;
  }
};

/// The codes of quad k, one a byte.
__device__ u32 quad_codes(const CodePlace& place, int format, int k) {
  switch (format) {
    case kInt8:
      return place.word(k);
    case kInt4:
      return place.word(k / 2) >> (4 * (k & 1)) & 0x0f0f0f0fu;
    case kInt3: {
      const u32 low = place.word(k / 8 * 3 + k % 8 / 4) >> (2 * (k % 4)) & 0x03030303u;
      return low | (place.word(k / 8 * 3 + 2) >> (k % 8) & 0x01010101u) << 2;
    }
    default:
      return place.word(k / 4) >> (2 * (k & 3)) & 0x03030303u;
  }
}

/// The largest half <= value, -65504 at least.
__device__ u16 half_below(float value) {
  u16 bits = float_to_half(value);
  if (half_to_float(bits) > value) bits = (bits & 0x7fff) == 0 ? 0x8001 : bits & 0x8000 ? bits + 1 : bits - 1;
  return bits == 0xfc00 ? 0xfbff : bits;
}

/// Over the sixteen lanes of a group.
template <class Combine>
__device__ __forceinline__ auto over_group(auto value, Combine combine) {
#pragma unroll
  for (int i = 8; i > 0; i >>= 1) value = combine(value, __shfl_xor_sync(~0u, value, i));
  return value;
}

/// Writes a group as codes: all sixteen lanes together, the lanes of `n` numbers with something to
/// write; `active` for groups that exist.
__device__ void encode(u64 head, int format, int block_size, int head_dim, int token, int group,
                       int quad, const float (&numbers)[4], int n, bool active) {
  const float infinity = __uint_as_float(0x7f800000);
  float smallest = infinity;
  float largest = -infinity;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < n) {
      finite = finite && fabsf(numbers[i]) < infinity;
      smallest = fminf(smallest, numbers[i]);
      largest = fmaxf(largest, numbers[i]);
    }
  }
  smallest = over_group(smallest, [](float a, float b) { return fminf(a, b); });
  largest = over_group(largest, [](float a, float b) { return fmaxf(a, b); });
  finite = over_group(int(finite), [](int a, int b) { return a & b; });

  const u32 max_code = (1u << format_bits(format)) - 1;
  u16 scale_bits = 0;
  u16 minimum_bits = 0x7e00;
  if (finite) {
    minimum_bits = half_below(smallest);
    const float steps = float(max_code);
    const float range = __fsub_rn(largest, half_to_float(minimum_bits));
    scale_bits = float_to_half(__fdiv_rn(range, steps));
    if (scale_bits > 0x7bff) scale_bits = 0x7bff;
    if (__fmul_rn(half_to_float(scale_bits), steps + 0.5f) < range && scale_bits < 0x7bff) {
      ++scale_bits;
    }
  }
  const float scale = half_to_float(scale_bits);
  const float inverse = scale > 0 ? __fdiv_rn(1.0f, scale) : 0;
  const float minimum = half_to_float(minimum_bits);
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < n) {
      const float code = __fadd_rn(__fmul_rn(__fsub_rn(numbers[i], minimum), inverse), 0.5f);
      const float kept = code > 0 ? fminf(code, float(max_code)) : 0.0f;
      codes |= u32(kept) << (8 * i);
    }
  }

  const CodePlace place(head, format, block_size, head_dim, token, group);
  const int k = group * (kGroup / 4) + quad;
  const auto or_with = [](u32 value, int distance) {
    return value | __shfl_xor_sync(~0u, value, distance);
  };
  const int n_words = code_words(format, head_dim);
  const auto put = [&](int index, u32 word, bool mine) {
    if (active && mine && index < n_words) place.set_word(index, word);
  };
  switch (format) {
    case kInt8:
      put(k, codes, true);
      break;
    case kInt4:
      put(k / 2, or_with(codes << (4 * (k & 1)), 1), (k & 1) == 0);
      break;
    case kInt3: {
      const u32 low = or_with(or_with((codes & 0x03030303u) << (2 * (k & 3)), 1), 2);
      u32 high = (codes >> 2 & 0x01010101u) << (k & 7);
      high = or_with(or_with(or_with(high, 1), 2), 4);
      put(k / 8 * 3 + k % 8 / 4, low, (k & 3) == 0);
      put(k / 8 * 3 + 2, high, (k & 7) == 0);
      break;
    }
    default:
      put(k / 4, or_with(or_with(codes << (2 * (k & 3)), 1), 2), (k & 3) == 0);
  }
  if (active && quad == 0) {
    *reinterpret_cast<u16*>(place.scale) = scale_bits;
    *reinterpret_cast<u16*>(place.minimum) = minimum_bits;
  }
}

__device__ __forceinline__ void read_array(float (&numbers)[4], const Kind& kind, u64 data,
                                           int token, const Quad& q) {
  const u64 at = q.head * kind.head_stride + token * kind.token_stride + q.dim * kind.dim_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.n) numbers[i] = read_float(kind.from_format, data, at + i * kind.dim_stride);
  }
}

__device__ __forceinline__ void write_array(const float (&numbers)[4], const Kind& kind, u64 data,
                                            int token, const Quad& q) {
  const u64 at = q.head * kind.head_stride + token * kind.token_stride + q.dim * kind.dim_stride;
  if (q.n == 4 && kind.dim_stride == 1 && kind.to_format != kFp32 && (data + at * 2) % 8 == 0) {
    const bool bf16 = kind.to_format == kBf16;
    uint2 words;
    words.x = bf16 ? pack2<true>(numbers[0], numbers[1]) : pack2<false>(numbers[0], numbers[1]);
    words.y = bf16 ? pack2<true>(numbers[2], numbers[3]) : pack2<false>(numbers[2], numbers[3]);
    *reinterpret_cast<uint2*>(data + at * 2) = words;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.n) write_float(kind.to_format, data, at + i * kind.dim_stride, numbers[i]);
  }
}

__device__ __forceinline__ void read_page(float (&numbers)[4], int format, int block_size,
                                          const Kind& kind, u64 page, int token, const Quad& q) {
  const u64 head = page + u64(q.head) * head_bytes(format, block_size, kind.head_dim);
  if (is_coded(format)) {
    if (q.n == 0) return;
    const CodePlace place(head, format, block_size, kind.head_dim, token, q.group);
    const u32 codes = quad_codes(place, format, q.dim / 4);
    const float scale = half_to_float(*reinterpret_cast<const u16*>(place.scale));
    const float minimum = half_to_float(*reinterpret_cast<const u16*>(place.minimum));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      numbers[i] = __fadd_rn(minimum, __fmul_rn(scale, float(codes >> (8 * i) & 0xff)));
    }
    return;
  }
  const u64 at = u64(token) * kind.head_dim + q.dim;
  if (q.n == 4 && format != kFp32 && (kind.head_dim & 3) == 0) {
    const uint2 words = *reinterpret_cast<const uint2*>(head + at * 2);
    const bool bf16 = format == kBf16;
    numbers[0] = bf16 ? unpack_low<true>(words.x) : unpack_low<false>(words.x);
    numbers[1] = bf16 ? unpack_high<true>(words.x) : unpack_high<false>(words.x);
    numbers[2] = bf16 ? unpack_low<true>(words.y) : unpack_low<false>(words.y);
    numbers[3] = bf16 ? unpack_high<true>(words.y) : unpack_high<false>(words.y);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.n) numbers[i] = read_float(format, head, at + i);
  }
}

/// The sixteen lanes of a group together.
__device__ __forceinline__ void write_page(const float (&numbers)[4], int block_size,
                                           const Kind& kind, u64 page, int token, const Quad& q,
                                           bool exists) {
  const u64 head = page + u64(q.head) * head_bytes(kind.to_format, block_size, kind.head_dim);
  if (is_coded(kind.to_format)) {
    encode(head, kind.to_format, block_size, kind.head_dim, token, q.group, q.lane, numbers, q.n,
           exists);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.n) {
      write_float(kind.to_format, head, u64(token) * kind.head_dim + q.dim + i, numbers[i]);
    }
  }
}

/// Codes go from page to page as they are: read and encoded again, they could change.
__device__ void copy_codes(int block_size, const Kind& kind, const Move& move, const Quad& q) {
  const int format = kind.to_format;
  const u64 head = u64(q.head) * head_bytes(format, block_size, kind.head_dim);
  const CodePlace from(move.from + head, format, block_size, kind.head_dim,
                       move.from_token + q.token, q.group);
  const CodePlace to(move.to + head, format, block_size, kind.head_dim, move.to_token + q.token,
                     q.group);
  const int of_group = code_words(format, kGroup);
  const int word = q.group * of_group + q.lane;
  if (q.lane < of_group && word < code_words(format, kind.head_dim)) {
    to.set_word(word, from.word(word));
  }
  if (q.lane == 0) {
    *reinterpret_cast<u16*>(to.scale) = *reinterpret_cast<const u16*>(from.scale);
    *reinterpret_cast<u16*>(to.minimum) = *reinterpret_cast<const u16*>(from.minimum);
  }
}

// Half a warp takes an item: blocks are of 256 threads, 16 items.

extern "C" __global__ void __launch_bounds__(256) move_tokens(const __grid_constant__ Moves p) {
  const Move& move = p.moves[blockIdx.y];
  const Kind& kind = p.kinds[move.kind];
  const int n_items = move.n_tokens * kind.n_heads * scale_groups(kind.head_dim);
  for (int first = blockIdx.x * 16; first < n_items; first += gridDim.x * 16) {
    const int item = first + (threadIdx.x >> 4);
    const bool exists = item < n_items;
    const Quad quad(kind, item, move.n_tokens, exists);
    if (kind.from_page && kind.to_page && kind.from_format == kind.to_format &&
        is_coded(kind.to_format)) {
      if (exists) copy_codes(p.block_size, kind, move, quad);
      continue;
    }
    const int from = move.from_token + quad.token;
    const int to = move.to_token + quad.token;
    float numbers[4] = {};
    if (kind.from_page) {
      read_page(numbers, kind.from_format, p.block_size, kind, move.from, from, quad);
    } else {
      read_array(numbers, kind, move.from, from, quad);
    }
    if (kind.to_page) {
      write_page(numbers, p.block_size, kind, move.to, to, quad, exists);
    } else {
      write_array(numbers, kind, move.to, to, quad);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) gather_pages(const __grid_constant__ Gather p) {
  const u64 n_items = u64(p.n_rows) * p.kind.n_heads * scale_groups(p.kind.head_dim);
  for (u64 first = u64(blockIdx.x) * 16; first < n_items; first += u64(gridDim.x) * 16) {
    const u64 item = first + (threadIdx.x >> 4);
    const Quad quad(p.kind, int(item), p.n_rows, item < n_items);
    float numbers[4] = {};
    if (quad.token >= p.n_padding) {
      const int token = p.first_token + quad.token - p.n_padding;
      const u64 entry = reinterpret_cast<const u64*>(p.pages)[token / p.block_size];
      read_page(numbers, page_format(entry), p.block_size, p.kind, page_address(entry),
                token % p.block_size, quad);
    }
    write_array(numbers, p.kind, p.to, quad.token, quad);
  }
}

extern "C" __global__ void set_entries(const __grid_constant__ Entries p) {
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
    reinterpret_cast<u64*>(p.tables[i])[p.indices[i]] = p.values[i];
  }
}
