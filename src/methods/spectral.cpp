#include "kvpool/methods/spectral.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/methods/packed_codes.h"
#include "kvpool/methods/page_layout.h"

namespace kvpool::methods {

// Page: scales [n_scales, capacity], of the signal, of the noise and of the sketch; then
// signal [capacity, signal_bytes], noise [capacity, noise_bytes], signs [capacity, sketch_bytes].

namespace {

/// Columns as rows.
std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t n) {
  std::vector<float> rows(matrix.size());
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      rows[static_cast<std::size_t>(j * n + i)] = matrix[static_cast<std::size_t>(i * n + j)];
    }
  }
  return rows;
}

/// More bits for the signal coordinates of calibrated data. Queries lie where keys do, so an error
/// of the signal counts many times one of the noise.
constexpr int kMoreSignalBits = 2;

/// Turns the signal and the noise, each within itself: codebooks expect coordinates of one size,
/// and those of an eigenbasis fall off. `vectors` are columns.
std::vector<float> turned_within(std::vector<float> vectors, std::int64_t n,
                                 std::int64_t signal_dims, std::uint64_t seed) {
  const auto signal = make_rotation(signal_dims, seed);
  const auto noise = make_rotation(n - signal_dims, seed);
  std::vector<float> row(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    float* const coordinates = vectors.data() + i * n;
    std::copy_n(coordinates, n, row.data());
    signal->apply(row.data(), coordinates);
    noise->apply(row.data() + signal_dims, coordinates + signal_dims);
  }
  return vectors;
}

}  // namespace

Spectral::Spectral(Parts parts) : StreamCodec(parts.basis->rows()), parts_(std::move(parts)) {}

std::int64_t Spectral::signal_bytes() const noexcept {
  return packed_bytes(parts_.signal_dims, parts_.signal.bits());
}

std::int64_t Spectral::noise_bytes() const noexcept {
  return packed_bytes(noise_dims(), parts_.noise.bits());
}

std::int64_t Spectral::code_dims() const noexcept {
  return parts_.sketch ? sketch_at() + parts_.sketch->n_signs() : noise_at() + noise_dims();
}

std::int64_t Spectral::page_bytes(std::int64_t capacity) const noexcept {
  return capacity * (2 * n_scales() + signal_bytes() + noise_bytes() + sketch_bytes());
}

std::int64_t Spectral::scratch_floats(std::int64_t n_tokens) const noexcept {
  const std::int64_t n_signs = parts_.sketch ? parts_.sketch->n_signs() : 0;
  return std::max(head_dim() + n_signs, n_tokens);
}

std::int64_t Spectral::constant_bytes() const noexcept {
  return parts_.basis->memory_bytes() +
         (parts_.sketch ? parts_.sketch->projection().memory_bytes() : 0);
}

void Spectral::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                      float* scratch) const noexcept {
  const std::int64_t n_signal = parts_.signal_dims;
  std::uint8_t codes[kMaxDims];
  std::byte* signal_rows = page.data + 2 * n_scales() * page.capacity;
  std::byte* noise_rows = signal_rows + page.capacity * signal_bytes();
  std::byte* sign_rows = noise_rows + page.capacity * noise_bytes();
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    float* signal = scratch;
    float* noise = scratch + n_signal;
    parts_.basis->apply(vectors + t * stride, scratch);

    const Magnitude scale = parts_.signal.encode(signal, n_signal, codes);
    halves_at(page, 0)[token] = scale;
    pack_codes({codes, static_cast<std::size_t>(n_signal)}, parts_.signal.bits(),
               signal_rows + token * signal_bytes());
    if (parts_.sketch) {
      for (std::int64_t i = 0; i < n_signal; ++i) {
        signal[i] -= from_magnitude(scale) * parts_.signal.codebook().level(codes[i]);
      }
      halves_at(page, 4 * page.capacity)[token] =
          parts_.sketch->encode(signal, sign_rows + token * sketch_bytes(), scratch + head_dim());
    }
    halves_at(page, 2 * page.capacity)[token] = parts_.noise.encode(noise, noise_dims(), codes);
    pack_codes({codes, static_cast<std::size_t>(noise_dims())}, parts_.noise.bits(),
               noise_rows + token * noise_bytes());
  }
}

void Spectral::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                      kernels::FloatRows out, float* scratch) const noexcept {
  std::int64_t offset = 2 * n_scales() * page.capacity;
  const auto decode_part = [&](std::int64_t part, std::int64_t row_bytes, std::int64_t n_codes,
                               int bits, const float* levels, std::int64_t at) {
    read_magnitudes(halves_at(page, 2 * part * page.capacity) + range.first, range.count, scratch);
    const auto rows =
        code_rows(page, page_bytes(page.capacity), offset, row_bytes, range, n_codes, bits);
    kernels.decode_table(rows, levels, scratch, {out.data + at, out.stride});
    offset += page.capacity * row_bytes;
  };
  decode_part(0, signal_bytes(), parts_.signal_dims, parts_.signal.bits(),
              parts_.signal.codebook().levels(), 0);
  decode_part(1, noise_bytes(), noise_dims(), parts_.noise.bits(), parts_.noise.codebook().levels(),
              noise_at());
  if (parts_.sketch) {
    decode_part(2, sketch_bytes(), parts_.sketch->n_signs(), 1, SignSketch::kLevels, sketch_at());
  }
}

void Spectral::enter(const float* vector, float* code_vector) const noexcept {
  float coordinates[kMaxDims];
  parts_.basis->apply(vector, coordinates);
  std::fill_n(code_vector, code_dims(), 0.0f);
  std::copy_n(coordinates, parts_.signal_dims, code_vector);
  std::copy_n(coordinates + parts_.signal_dims, noise_dims(), code_vector + noise_at());
  if (parts_.sketch) parts_.sketch->projection().apply(coordinates, code_vector + sketch_at());
}

void Spectral::leave(const float* code_vector, float* vector) const noexcept {
  float coordinates[kMaxDims];
  std::copy_n(code_vector, parts_.signal_dims, coordinates);
  std::copy_n(code_vector + noise_at(), noise_dims(), coordinates + parts_.signal_dims);
  if (parts_.sketch) {
    float signal[kMaxDims];
    parts_.sketch->projection().apply_transposed(code_vector + sketch_at(), signal);
    for (std::int64_t i = 0; i < parts_.signal_dims; ++i) coordinates[i] += signal[i];
  }
  parts_.basis->apply_transposed(coordinates, vector);
}

Method make_spectral(const KVCacheConfig& config) {
  const auto seed = static_cast<std::uint64_t>(config.seed);
  const auto bits = static_cast<int>(config.bit_width_inlier);
  const std::int64_t dims = config.head_dim;
  const auto kind = config.as_published ? RotationKind::kHaar : RotationKind::kHadamard;
  const SpectralCalibration* calibration = config.spectral_calibration.get();

  const auto codec = [&](const std::vector<float>* vectors, std::uint64_t basis_seed,
                         std::int64_t signal_dims, TokenScale scale, bool with_sketch) {
    // The published coder rounds a block as if it were as long as the vector.
    const auto levels = [&](std::int64_t n, int n_bits) {
      return LevelCoder(Codebook::of_unit_vectors(config.as_published ? dims : n, n_bits), scale);
    };
    const bool calibrated = vectors != nullptr && !config.as_published;
    const int signal_bits = calibrated ? std::min(bits + kMoreSignalBits, 8) : bits;
    const auto basis = [&] {
      if (vectors == nullptr) return make_rotation(dims, basis_seed, kind);
      if (!calibrated) return make_dense_map(dims, dims, transposed(*vectors, dims));
      return make_dense_map(
          dims, dims, transposed(turned_within(*vectors, dims, signal_dims, basis_seed), dims));
    };
    std::optional<SignSketch> sketch;
    if (with_sketch) {
      sketch = make_sign_sketch(signal_dims, signal_dims, seed + 1, config.as_published);
    }
    return std::make_unique<Spectral>(
        Spectral::Parts{basis(), signal_dims, levels(signal_dims, signal_bits),
                        levels(dims - signal_dims, bits), std::move(sketch)});
  };
  return {config,
          codec(calibration ? &calibration->key_vectors : nullptr, seed,
                calibration ? calibration->key_signal_dims
                            : std::min(config.spectral_key_d_eff, dims - 1),
                key_scale(config), config.spectral_apply_qjl),
          codec(calibration ? &calibration->value_vectors : nullptr, seed + 1,
                calibration ? calibration->value_signal_dims
                            : std::min(config.spectral_val_d_eff, dims - 1),
                config.as_published ? TokenScale::kNorm : TokenScale::kLeastSquares, false)};
}

}  // namespace kvpool::methods
