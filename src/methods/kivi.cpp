#include "kvpool/methods/kivi.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kvpool/base/half.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/packed_codes.h"
#include "kvpool/methods/page_layout.h"

namespace kvpool::methods {
namespace {

using formats::Format;

/// Shrunk copies of the range between the extremes that kBest tries; 1 is kExtremes.
constexpr float kShrinks[] = {1.0f, 0.85f, 0.72f, 0.6f, 0.5f, 0.4f};
/// More bits have levels to spare: the extremes are best or nearly so.
constexpr int kMostSearchedBits = 2;

std::size_t n_shrinks(int bits, GridEnds ends) noexcept {
  return ends == GridEnds::kBest && bits <= kMostSearchedBits ? std::size(kShrinks) : 1;
}

/// What a group of numbers is rounded with, as it is kept.
struct Grid {
  std::uint16_t zero_bits;
  Magnitude step_bits;
  float zero;
  float step;
  float inverse;

  Grid(float low, float high, float shrink, int bits, Format format) noexcept {
    const float cut = (1 - shrink) / 2 * (high - low);
    const bool half = format == Format::kFp16;
    zero_bits = half ? float_to_half(low + cut) : float_to_bfloat16(low + cut);
    zero = half ? half_to_float(zero_bits) : bfloat16_to_float(zero_bits);
    const auto n_steps = static_cast<float>((1 << bits) - 1);
    step_bits = to_magnitude(std::max(0.0f, high - cut - zero) / n_steps);
    step = from_magnitude(step_bits);
    inverse = step > 0 ? 1 / step : 0;
  }
};

/// The nearest code, half to even, as a whole float: in operations that compilers vectorise.
float nearest_code(float number, float zero, float inverse, float largest) noexcept {
  constexpr float kRound = 0x1.8p23f;  // no fraction bits are left above it
  const float code = std::min(std::max((number - zero) * inverse, 0.0f), largest);
  return (code + kRound) - kRound;
}

void read_zeros(const std::uint16_t* zeros, std::int64_t n, Format format,
                const kernels::RowKernels& kernels, float* out) noexcept {
  const auto widen = format == Format::kFp16 ? kernels.decode_half : kernels.decode_bfloat16;
  widen(zeros, 1, n, {out, kernels::padded_row(n)});
}

}  // namespace

// Keys. Page: steps [capacity / group, head_dim], zeros [capacity / group, head_dim],
// codes [capacity, packed_bytes(head_dim)].

KiviKeys::KiviKeys(std::int64_t head_dim, int bits, std::int64_t group, Format number_format)
    : StreamCodec(head_dim), bits_(bits), group_(group), number_format_(number_format) {}

std::int64_t KiviKeys::page_bytes(std::int64_t capacity) const noexcept {
  return capacity / group_ * 4 * head_dim() + capacity * packed_bytes(head_dim(), bits_);
}

std::int64_t KiviKeys::scratch_floats(std::int64_t) const noexcept {
  return 2 * kernels::padded_row(head_dim());
}

void KiviKeys::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                      float* scratch) const noexcept {
  const std::int64_t dims = head_dim();
  const std::int64_t row_bytes = packed_bytes(dims, bits_);
  const auto largest = static_cast<float>((1 << bits_) - 1);
  // Of each channel: the extremes, then the grid.
  float* const low = scratch;
  float* const high = scratch + kernels::padded_row(dims);
  std::uint8_t codes[kMaxDims];
  for (std::int64_t first = 0; first < range.count; first += group_) {
    const float* rows = vectors + first * stride;
    std::copy_n(rows, dims, low);
    std::copy_n(rows, dims, high);
    for (std::int64_t t = 1; t < group_; ++t) {
      const float* row = rows + t * stride;
      for (std::int64_t i = 0; i < dims; ++i) {
        low[i] = std::min(low[i], row[i]);
        high[i] = std::max(high[i], row[i]);
      }
    }
    const std::int64_t group = (range.first + first) / group_;
    const std::int64_t n_groups = page.capacity / group_;
    std::uint16_t* const steps = halves_at(page, 2 * group * dims);
    std::uint16_t* const zeros = halves_at(page, 2 * (n_groups + group) * dims);

    for (std::int64_t i = 0; i < dims; ++i) {
      const Grid grid(low[i], high[i], 1, bits_, number_format_);
      steps[i] = grid.step_bits;
      zeros[i] = grid.zero_bits;
      low[i] = grid.zero;
      high[i] = grid.inverse;
    }
    std::byte* packed = page.data + 4 * n_groups * dims + (range.first + first) * row_bytes;
    for (std::int64_t t = 0; t < group_; ++t) {
      const float* row = rows + t * stride;
      for (std::int64_t i = 0; i < dims; ++i) {
        codes[i] = static_cast<std::uint8_t>(nearest_code(row[i], low[i], high[i], largest));
      }
      pack_codes({codes, static_cast<std::size_t>(dims)}, bits_, packed + t * row_bytes);
    }
  }
}

void KiviKeys::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                      kernels::FloatRows out, float* scratch) const noexcept {
  const std::int64_t dims = head_dim();
  const std::int64_t n_groups = page.capacity / group_;
  float* steps = scratch;
  float* zeros = scratch + kernels::padded_row(dims);
  for (std::int64_t done = 0; done < range.count;) {
    const std::int64_t token = range.first + done;
    const std::int64_t group = token / group_;
    const std::int64_t count = std::min(range.count - done, (group + 1) * group_ - token);
    read_magnitudes(halves_at(page, 2 * group * dims), dims, steps);
    read_zeros(halves_at(page, 2 * (n_groups + group) * dims), dims, number_format_, kernels,
               zeros);
    const auto rows = code_rows(page, page_bytes(page.capacity), 4 * n_groups * dims,
                                packed_bytes(dims, bits_), {token, count}, dims, bits_);
    kernels.decode_columns(rows, steps, zeros, {out.data + done * out.stride, out.stride});
    done += count;
  }
}

// Values. Page: steps [capacity, n_groups], zeros [capacity, n_groups],
// codes [capacity, packed_bytes(head_dim)].

KiviValues::KiviValues(std::int64_t head_dim, int bits, std::int64_t group, Format number_format,
                       GridEnds ends)
    : StreamCodec(head_dim),
      bits_(bits),
      group_(std::gcd(head_dim, group)),
      number_format_(number_format),
      ends_(ends) {}

std::int64_t KiviValues::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * (4 * n_groups() + packed_bytes(head_dim(), bits_));
}

std::int64_t KiviValues::scratch_floats(std::int64_t n_tokens) const noexcept {
  return std::max(group_, 2 * kernels::padded_row(n_tokens * n_groups()));
}

void KiviValues::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                        float* scratch) const noexcept {
  const std::int64_t row_bytes = packed_bytes(head_dim(), bits_);
  const auto largest = static_cast<float>((1 << bits_) - 1);
  const std::size_t n_tried = n_shrinks(bits_, ends_);
  std::uint8_t codes[kMaxDims];
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    std::uint16_t* const steps = halves_at(page, 2 * token * n_groups());
    std::uint16_t* const zeros = halves_at(page, 2 * (page.capacity + token) * n_groups());
    for (std::int64_t g = 0; g < n_groups(); ++g) {
      const float* numbers = vectors + t * stride + g * group_;
      float low = numbers[0];
      float high = numbers[0];
      for (std::int64_t i = 1; i < group_; ++i) {
        low = std::min(low, numbers[i]);
        high = std::max(high, numbers[i]);
      }
      Grid best(low, high, 1, bits_, number_format_);
      float least_error = std::numeric_limits<float>::infinity();
      for (std::size_t tried = 0; n_tried > 1 && tried < n_tried; ++tried) {
        const Grid grid(low, high, kShrinks[tried], bits_, number_format_);
        for (std::int64_t i = 0; i < group_; ++i) {
          const float code = nearest_code(numbers[i], grid.zero, grid.inverse, largest);
          const float miss = code * grid.step + grid.zero - numbers[i];
          scratch[i] = miss * miss;
        }
        const float error = std::accumulate(scratch, scratch + group_, 0.0f);
        if (error >= least_error) continue;
        least_error = error;
        best = grid;
      }
      steps[g] = best.step_bits;
      zeros[g] = best.zero_bits;
      for (std::int64_t i = 0; i < group_; ++i) {
        codes[g * group_ + i] =
            static_cast<std::uint8_t>(nearest_code(numbers[i], best.zero, best.inverse, largest));
      }
    }
    pack_codes({codes, static_cast<std::size_t>(head_dim())}, bits_,
               page.data + 4 * page.capacity * n_groups() + token * row_bytes);
  }
}

void KiviValues::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                        kernels::FloatRows out, float* scratch) const noexcept {
  const std::int64_t first = range.first * n_groups();
  const std::int64_t n = range.count * n_groups();
  float* steps = scratch;
  float* zeros = scratch + kernels::padded_row(n);
  read_magnitudes(halves_at(page, 0) + first, n, steps);
  read_zeros(halves_at(page, 2 * page.capacity * n_groups()) + first, n, number_format_, kernels,
             zeros);
  const auto rows = code_rows(page, page_bytes(page.capacity), 4 * page.capacity * n_groups(),
                              packed_bytes(head_dim(), bits_), range, head_dim(), bits_);
  kernels.decode_groups(rows, group_, steps, zeros, out);
}

Method make_kivi(const KVCacheConfig& config) {
  const auto bits = static_cast<int>(config.bit_width_inlier);
  const auto value_bits = static_cast<int>(config.value_bits.value_or(bits));
  // Half floats cannot hold every fp32 zero, bfloat16 ones can.
  const Format zeros = config.precision == Format::kFp16 ? Format::kFp16 : Format::kBf16;
  const GridEnds ends = config.as_published ? GridEnds::kExtremes : GridEnds::kBest;
  return {config, std::make_unique<KiviKeys>(config.head_dim, bits, config.kivi_group_size, zeros),
          std::make_unique<KiviValues>(config.head_dim, value_bits, config.kivi_group_size, zeros,
                                       ends)};
}

}  // namespace kvpool::methods
