// Vector versions of row_kernels_scalar. Highway compiles this file once a target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "row_kernels_simd.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>
//
#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "code_lanes.h"
#include "kvpool/base/half.h"
#include "kvpool/kernels/row_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

// One lane has nothing to shuffle.
RowKernels Kernels() { return scalar_row_kernels(); }

#else

namespace hn = hwy::HWY_NAMESPACE;

// Never wider than a row's padding.
using D = hn::CappedTag<float, kRowPadding>;
using Codes = hn::RebindToSigned<D>;
using Bytes = hn::Repartition<std::uint8_t, D>;
using V = hn::Vec<D>;

HWY_INLINE std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(D())); }

// Spreads packed codes over lanes. Sixteen codes lie in 2 * bits bytes; each lane picks the two
// bytes that hold its code with one byte shuffle, then shifts and masks.
class CodeLoader {
 public:
  explicit CodeLoader(const CodeRows& rows)
      : rows_(rows), lanes_of_bits_(kCodeLanes[rows.bits]), mask_((1u << rows.bits) - 1) {}

  /// use(i, codes): the codes of row `r` from code i on, one a lane, until all n_codes were seen.
  /// Lanes past the last code hold any code.
  template <class Use>
  HWY_INLINE void for_each(std::int64_t r, Use use) const {
    const std::byte* row = rows_.codes + r * rows_.row_bytes;
    const std::int64_t step = kRowPadding * rows_.bits / 8;
    alignas(16) std::uint8_t tail[16] = {};
    for (std::int64_t i = 0; i < rows_.n_codes; i += kRowPadding, row += step) {
      auto bytes = reinterpret_cast<const std::uint8_t*>(row);
      if (HWY_UNLIKELY(rows_.end - row < 16)) {
        std::memcpy(tail, row, static_cast<std::size_t>(rows_.end - row));
        bytes = tail;
      }
      for (std::int64_t j = 0; j < kRowPadding; j += lanes()) use(i + j, load(bytes, j));
    }
  }

 private:
  HWY_INLINE hn::Vec<Codes> load(const std::uint8_t* bytes, std::int64_t j) const {
    const hn::RebindToUnsigned<D> words;
    const auto spread = hn::TableLookupBytes(hn::LoadDup128(Bytes(), bytes),
                                             hn::Load(Bytes(), lanes_of_bits_.bytes + 4 * j));
    const auto shifted =
        hn::Shr(hn::BitCast(words, spread), hn::Load(words, lanes_of_bits_.shifts + j));
    return hn::BitCast(Codes(), hn::And(shifted, hn::Set(words, mask_)));
  }

  const CodeRows& rows_;
  const CodeLanes& lanes_of_bits_;
  std::uint32_t mask_;
};

// Looks codes up in a table: in one register where it fits, otherwise in memory.
struct RegisterTable {
  V entries;
  explicit RegisterTable(const float* table) : entries(hn::LoadU(D(), table)) {}
  HWY_INLINE V operator[](hn::Vec<Codes> codes) const {
    return hn::TableLookupLanes(entries, hn::IndicesFromVec(D(), codes));
  }
};
struct MemoryTable {
  const float* entries;
  explicit MemoryTable(const float* table) : entries(table) {}
  HWY_INLINE V operator[](hn::Vec<Codes> codes) const {
    return hn::GatherIndex(D(), entries, codes);
  }
};
HWY_INLINE bool fits_register(int bits) { return (std::int64_t{1} << bits) <= lanes(); }

template <class Table>
HWY_INLINE void decode_table_as(const CodeRows& rows, const float* entries, const float* scales,
                                FloatRows out) {
  const D d;
  const Table table(entries);
  const CodeLoader loader(rows);
  for (std::int64_t r = 0; r < rows.n_rows; ++r) {
    float* HWY_RESTRICT to = out.data + r * out.stride;
    const V scale = hn::Set(d, scales[r]);
    loader.for_each(r, [&](std::int64_t i, auto codes)
                           HWY_ATTR { hn::StoreU(hn::Mul(scale, table[codes]), d, to + i); });
  }
}

void decode_table(const CodeRows& rows, const float* table, const float* scales,
                  FloatRows out) noexcept {
  if (fits_register(rows.bits)) return decode_table_as<RegisterTable>(rows, table, scales, out);
  decode_table_as<MemoryTable>(rows, table, scales, out);
}

void decode_columns(const CodeRows& rows, const float* step, const float* zero,
                    FloatRows out) noexcept {
  const D d;
  const CodeLoader loader(rows);
  for (std::int64_t r = 0; r < rows.n_rows; ++r) {
    float* HWY_RESTRICT to = out.data + r * out.stride;
    loader.for_each(r, [&](std::int64_t i, auto codes) HWY_ATTR {
      const V number =
          hn::MulAdd(hn::ConvertTo(d, codes), hn::LoadU(d, step + i), hn::LoadU(d, zero + i));
      hn::StoreU(number, d, to + i);
    });
  }
}

void decode_groups(const CodeRows& rows, std::int64_t group, const float* step, const float* zero,
                   FloatRows out) noexcept {
  if (group % kRowPadding != 0) {
    return scalar_row_kernels().decode_groups(rows, group, step, zero, out);
  }
  const D d;
  const CodeLoader loader(rows);
  for (std::int64_t r = 0; r < rows.n_rows; ++r) {
    float* HWY_RESTRICT to = out.data + r * out.stride;
    std::int64_t in_group = 0;
    loader.for_each(r, [&](std::int64_t i, auto codes) HWY_ATTR {
      const V number = hn::MulAdd(hn::ConvertTo(d, codes), hn::Set(d, *step), hn::Set(d, *zero));
      hn::StoreU(number, d, to + i);
      in_group += lanes();
      if (in_group == group) {
        in_group = 0;
        ++step;
        ++zero;
      }
    });
  }
}

template <class Table>
HWY_INLINE void decode_polar_as(const CodeRows& rows, const float* cosine, const float* sine,
                                ConstFloatRows in, FloatRows out) {
  const D d;
  const Table cosines(cosine);
  const Table sines(sine);
  const CodeLoader loader(rows);
  // Where the last vector of the cosine half runs into the sine half, it has to be stored before.
  const bool at_once =
      rows.n_codes % kRowPadding == 0 || (rows.n_codes < kRowPadding && lanes() == kRowPadding);
  for (std::int64_t r = 0; r < rows.n_rows; ++r) {
    const float* HWY_RESTRICT radii = in.data + r * in.stride;
    float* HWY_RESTRICT to = out.data + r * out.stride;
    const auto store_cosines = [&](std::int64_t i, auto codes) HWY_ATTR {
      hn::StoreU(hn::Mul(hn::LoadU(d, radii + i), cosines[codes]), d, to + i);
    };
    const auto store_sines = [&](std::int64_t i, auto codes) HWY_ATTR {
      hn::StoreU(hn::Mul(hn::LoadU(d, radii + i), sines[codes]), d, to + rows.n_codes + i);
    };
    if (at_once) {
      loader.for_each(r, [&](std::int64_t i, auto codes) HWY_ATTR {
        store_cosines(i, codes);
        store_sines(i, codes);
      });
    } else {
      loader.for_each(r, store_cosines);
      loader.for_each(r, store_sines);
    }
  }
}

void decode_polar(const CodeRows& rows, const float* cosine, const float* sine, ConstFloatRows in,
                  FloatRows out) noexcept {
  if (fits_register(rows.bits)) {
    return decode_polar_as<RegisterTable>(rows, cosine, sine, in, out);
  }
  decode_polar_as<MemoryTable>(rows, cosine, sine, in, out);
}

/// out[r][i] = load(r, r * dims + i) by vectors, narrow(r, r * dims + i) for the rest of a row.
template <class Load, class Narrow>
HWY_INLINE void widen(std::int64_t n_rows, std::int64_t dims, FloatRows out, Load load,
                      Narrow narrow) {
  const std::int64_t whole = dims - dims % lanes();
  for (std::int64_t r = 0; r < n_rows; ++r) {
    float* HWY_RESTRICT to = out.data + r * out.stride;
    for (std::int64_t i = 0; i < whole; i += lanes()) {
      hn::StoreU(load(r, r * dims + i), D(), to + i);
    }
    for (std::int64_t i = whole; i < dims; ++i) to[i] = narrow(r, r * dims + i);
  }
}

void decode_int8(const std::int8_t* codes, std::int64_t n_rows, std::int64_t dims,
                 const float* scales, FloatRows out) noexcept {
  const D d;
  const hn::Rebind<std::int8_t, D> narrow;
  widen(
      n_rows, dims, out,
      [&](std::int64_t r, std::int64_t i) HWY_ATTR {
        const auto wide = hn::PromoteTo(Codes(), hn::LoadU(narrow, codes + i));
        return hn::Mul(hn::Set(d, scales[r]), hn::ConvertTo(d, wide));
      },
      [&](std::int64_t r, std::int64_t i) { return scales[r] * static_cast<float>(codes[i]); });
}

void decode_half(const std::uint16_t* bits, std::int64_t n_rows, std::int64_t dims,
                 FloatRows out) noexcept {
  const hn::Rebind<hwy::float16_t, D> narrow;
  const auto* numbers = reinterpret_cast<const hwy::float16_t*>(bits);
  widen(
      n_rows, dims, out,
      [&](std::int64_t, std::int64_t i)
          HWY_ATTR { return hn::PromoteTo(D(), hn::LoadU(narrow, numbers + i)); },
      [&](std::int64_t, std::int64_t i) { return half_to_float(bits[i]); });
}

void decode_bfloat16(const std::uint16_t* bits, std::int64_t n_rows, std::int64_t dims,
                     FloatRows out) noexcept {
  const hn::Rebind<hwy::bfloat16_t, D> narrow;
  const auto* numbers = reinterpret_cast<const hwy::bfloat16_t*>(bits);
  widen(
      n_rows, dims, out,
      [&](std::int64_t, std::int64_t i)
          HWY_ATTR { return hn::PromoteTo(D(), hn::LoadU(narrow, numbers + i)); },
      [&](std::int64_t, std::int64_t i) { return bfloat16_to_float(bits[i]); });
}

void dot_rows(const float* query, ConstFloatRows rows, std::int64_t n_rows, std::int64_t width,
              float* scores) noexcept {
  const D d;
  const auto total = [&](V sum) HWY_ATTR { return hn::GetLane(hn::SumOfLanes(d, sum)); };
  std::int64_t r = 0;
  for (; r + 4 <= n_rows; r += 4) {  // four rows at a time: four independent chains
    const float* row0 = rows.data + r * rows.stride;
    const float* row1 = row0 + rows.stride;
    const float* row2 = row1 + rows.stride;
    const float* row3 = row2 + rows.stride;
    V s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    for (std::int64_t i = 0; i < width; i += lanes()) {
      const V q = hn::LoadU(d, query + i);
      s0 = hn::MulAdd(q, hn::LoadU(d, row0 + i), s0);
      s1 = hn::MulAdd(q, hn::LoadU(d, row1 + i), s1);
      s2 = hn::MulAdd(q, hn::LoadU(d, row2 + i), s2);
      s3 = hn::MulAdd(q, hn::LoadU(d, row3 + i), s3);
    }
    scores[r] = total(s0);
    scores[r + 1] = total(s1);
    scores[r + 2] = total(s2);
    scores[r + 3] = total(s3);
  }
  for (; r < n_rows; ++r) {
    V sum = hn::Zero(d);
    for (std::int64_t i = 0; i < width; i += lanes()) {
      sum = hn::MulAdd(hn::LoadU(d, query + i), hn::LoadU(d, rows.data + r * rows.stride + i), sum);
    }
    scores[r] = total(sum);
  }
}

float soften(float* scores, std::int64_t n, RunningSoftmax& state) noexcept {
  const D d;
  const float largest = std::max(state.largest, *std::max_element(scores, scores + n));
  const V shift = hn::Set(d, largest);
  V sum = hn::Zero(d);
  for (std::int64_t r = 0; r < n; r += lanes()) {
    const auto seen = hn::FirstN(d, static_cast<std::size_t>(n - r));
    V weight = hn::Exp(d, hn::Sub(hn::IfThenElse(seen, hn::LoadU(d, scores + r), shift), shift));
    weight = hn::IfThenElseZero(seen, weight);
    hn::StoreU(weight, d, scores + r);
    sum = hn::Add(sum, weight);
  }
  const float shrink = std::exp(state.largest - largest);
  state = {largest, state.total * shrink + hn::GetLane(hn::SumOfLanes(d, sum))};
  return shrink;
}

void add_rows(const float* weights, ConstFloatRows rows, std::int64_t n_rows, std::int64_t width,
              float shrink, float* sum) noexcept {
  const D d;
  const V factor = hn::Set(d, shrink);
  std::int64_t i = 0;
  for (; i + 4 * lanes() <= width; i += 4 * lanes()) {  // a tile of columns stays in registers
    float* HWY_RESTRICT to = sum + i;
    V s0 = hn::Mul(factor, hn::LoadU(d, to));
    V s1 = hn::Mul(factor, hn::LoadU(d, to + lanes()));
    V s2 = hn::Mul(factor, hn::LoadU(d, to + 2 * lanes()));
    V s3 = hn::Mul(factor, hn::LoadU(d, to + 3 * lanes()));
    const float* row = rows.data + i;
    for (std::int64_t r = 0; r < n_rows; ++r, row += rows.stride) {
      const V weight = hn::Set(d, weights[r]);
      s0 = hn::MulAdd(weight, hn::LoadU(d, row), s0);
      s1 = hn::MulAdd(weight, hn::LoadU(d, row + lanes()), s1);
      s2 = hn::MulAdd(weight, hn::LoadU(d, row + 2 * lanes()), s2);
      s3 = hn::MulAdd(weight, hn::LoadU(d, row + 3 * lanes()), s3);
    }
    hn::StoreU(s0, d, to);
    hn::StoreU(s1, d, to + lanes());
    hn::StoreU(s2, d, to + 2 * lanes());
    hn::StoreU(s3, d, to + 3 * lanes());
  }
  for (; i < width; i += lanes()) {
    V s = hn::Mul(factor, hn::LoadU(d, sum + i));
    const float* row = rows.data + i;
    for (std::int64_t r = 0; r < n_rows; ++r, row += rows.stride) {
      s = hn::MulAdd(hn::Set(d, weights[r]), hn::LoadU(d, row), s);
    }
    hn::StoreU(s, d, sum + i);
  }
}

RowKernels Kernels() {
  return {hwy::TargetName(HWY_TARGET),
          decode_table,
          decode_columns,
          decode_groups,
          decode_polar,
          decode_int8,
          decode_half,
          decode_bfloat16,
          dot_rows,
          soften,
          add_rows};
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "row_kernels_simd.h"
#include "simd_dispatch.h"

namespace kvpool::kernels {

HWY_EXPORT(Kernels);

std::vector<RowKernels> simd_row_kernels() {
  return made_kernels(HWY_DISPATCH_TABLE(Kernels), [](const RowKernels& kernels) {
    return kernels.target != scalar_row_kernels().target;
  });
}

}  // namespace kvpool::kernels
#endif
