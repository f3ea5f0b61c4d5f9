#include "kvpool/methods/linear_map.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "kvpool/methods/random.h"

namespace kvpool::methods {
namespace {

constexpr std::int64_t kFloat = sizeof(float);

/// Kept in both orders, so that either product runs along rows that lie in memory: its sums
/// vectorise without being reordered.
class DenseMap final : public LinearMap {
 public:
  DenseMap(std::int64_t rows, std::int64_t columns, std::span<const float> entries)
      : LinearMap(rows, columns), matrix_(entries.begin(), entries.end()), transposed_(matrix_) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        transposed_[static_cast<std::size_t>(j * rows + i)] =
            matrix_[static_cast<std::size_t>(i * columns + j)];
      }
    }
  }

  void apply(const float* in, float* out) const noexcept override {
    combine_rows(transposed_.data(), columns(), rows(), in, out);
  }
  void apply_transposed(const float* in, float* out) const noexcept override {
    combine_rows(matrix_.data(), rows(), columns(), in, out);
  }
  std::int64_t memory_bytes() const noexcept override { return 2 * rows() * columns() * kFloat; }

 private:
  /// out = sum_i in[i] * row i.
  static void combine_rows(const float* matrix, std::int64_t n, std::int64_t width, const float* in,
                           float* __restrict out) noexcept {
    std::fill_n(out, width, 0.0f);
    for (std::int64_t i = 0; i < n; ++i) {
      const float factor = in[i];
      const float* row = matrix + i * width;
      for (std::int64_t j = 0; j < width; ++j) out[j] += factor * row[j];
    }
  }

  std::vector<float> matrix_;
  std::vector<float> transposed_;
};

/// In place, unscaled: H x for the Hadamard matrix of +-1 in natural order.
void hadamard(float* __restrict x, std::int64_t n) noexcept {
  std::int64_t half = 1;
  for (; half < n && half < 4; half *= 2) {
    for (std::int64_t i = 0; i < n; i += 2 * half) {
      for (std::int64_t j = i; j < i + half; ++j) {
        const float a = x[j];
        const float b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
    }
  }
  for (; half < n; half *= 2) {
    for (std::int64_t i = 0; i < n; i += 2 * half) {
      float* __restrict low = x + i;
      float* __restrict high = x + i + half;
      for (std::int64_t j = 0; j < half; ++j) {
        const float a = low[j];
        const float b = high[j];
        low[j] = a + b;
        high[j] = a - b;
      }
    }
  }
}

class HadamardRotation final : public LinearMap {
 public:
  static constexpr int kRounds = 3;

  HadamardRotation(std::int64_t dims, std::uint64_t seed)
      : LinearMap(dims, dims), signs_(static_cast<std::size_t>(kRounds * dims)) {
    Random random(seed);
    // Each round takes 1 / sqrt(dims), part of its signs.
    const auto size = static_cast<float>(1 / std::sqrt(static_cast<double>(dims)));
    for (float& sign : signs_) sign = random.coin() ? size : -size;
  }

  void apply(const float* in, float* out) const noexcept override {
    std::copy_n(in, rows(), out);
    for (int round = 0; round < kRounds; ++round) {
      scale(out, round);
      hadamard(out, rows());
    }
  }
  void apply_transposed(const float* in, float* out) const noexcept override {
    std::copy_n(in, rows(), out);
    for (int round = kRounds - 1; round >= 0; --round) {
      hadamard(out, rows());
      scale(out, round);
    }
  }
  std::int64_t memory_bytes() const noexcept override { return kRounds * rows() * kFloat; }

 private:
  void scale(float* __restrict x, int round) const noexcept {
    const float* signs = signs_.data() + round * rows();
    for (std::int64_t i = 0; i < rows(); ++i) x[i] *= signs[i];
  }

  std::vector<float> signs_;
};

/// The first rows of several rotations under each other, times sqrt(dims).
class StackedRotations final : public LinearMap {
 public:
  StackedRotations(std::int64_t n_rows, std::int64_t dims, Random& random)
      : LinearMap(n_rows, dims), scale_(std::sqrt(static_cast<float>(dims))) {
    for (std::int64_t row = 0; row < n_rows; row += dims) {
      rotations_.push_back(make_rotation(dims, random.next()));
    }
  }

  void apply(const float* in, float* out) const noexcept override {
    float rotated[kMaxDims];
    for (std::int64_t part = 0; part < n_parts(); ++part) {
      rotations_[static_cast<std::size_t>(part)]->apply(in, rotated);
      for (std::int64_t i = 0; i < rows_of(part); ++i) {
        out[part * columns() + i] = scale_ * rotated[i];
      }
    }
  }
  void apply_transposed(const float* in, float* out) const noexcept override {
    float padded[kMaxDims];
    float turned[kMaxDims];
    std::fill_n(out, columns(), 0.0f);
    for (std::int64_t part = 0; part < n_parts(); ++part) {
      std::copy_n(in + part * columns(), rows_of(part), padded);
      std::fill(padded + rows_of(part), padded + columns(), 0.0f);
      rotations_[static_cast<std::size_t>(part)]->apply_transposed(padded, turned);
      for (std::int64_t i = 0; i < columns(); ++i) out[i] += scale_ * turned[i];
    }
  }
  std::int64_t memory_bytes() const noexcept override {
    std::int64_t bytes = 0;
    for (const auto& rotation : rotations_) bytes += rotation->memory_bytes();
    return bytes;
  }

 private:
  std::int64_t n_parts() const noexcept { return static_cast<std::int64_t>(rotations_.size()); }
  std::int64_t rows_of(std::int64_t part) const noexcept {
    return std::min(columns(), rows() - part * columns());
  }

  float scale_;
  std::vector<std::shared_ptr<const LinearMap>> rotations_;
};

/// Rows made orthonormal one after another; each is cleaned twice, which is enough for full
/// precision (Kahan, Parlett: "twice is enough").
void orthonormalise(std::vector<double>& rows, std::int64_t n) {
  const auto row = [&](std::int64_t i) { return rows.data() + i * n; };
  const auto dot = [n](const double* a, const double* b) {
    double sum = 0;
    for (std::int64_t k = 0; k < n; ++k) sum += a[k] * b[k];
    return sum;
  };
  for (std::int64_t i = 0; i < n; ++i) {
    double* current = row(i);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t j = 0; j < i; ++j) {
        const double* earlier = row(j);
        const double overlap = dot(current, earlier);
        for (std::int64_t k = 0; k < n; ++k) current[k] -= overlap * earlier[k];
      }
    }
    const double length = std::sqrt(dot(current, current));
    for (std::int64_t k = 0; k < n; ++k) current[k] /= length;
  }
}

}  // namespace

std::shared_ptr<const LinearMap> make_rotation(std::int64_t dims, std::uint64_t seed,
                                               RotationKind kind) {
  if (kind == RotationKind::kHadamard && std::has_single_bit(static_cast<std::uint64_t>(dims))) {
    return std::make_shared<HadamardRotation>(dims, seed);
  }
  Random random(seed);
  std::vector<double> rows(static_cast<std::size_t>(dims * dims));
  for (double& entry : rows) entry = random.normal();
  orthonormalise(rows, dims);
  const std::vector<float> entries(rows.begin(), rows.end());
  return std::make_shared<DenseMap>(dims, dims, entries);
}

std::shared_ptr<const LinearMap> make_projection(std::int64_t n_rows, std::int64_t dims,
                                                 std::uint64_t seed, ProjectionKind kind) {
  Random random(seed);
  if (kind == ProjectionKind::kOrthogonal) {
    return std::make_shared<StackedRotations>(n_rows, dims, random);
  }
  std::vector<float> entries(static_cast<std::size_t>(n_rows * dims));
  for (float& entry : entries) entry = static_cast<float>(random.normal());
  return std::make_shared<DenseMap>(n_rows, dims, entries);
}

std::shared_ptr<const LinearMap> make_dense_map(std::int64_t rows, std::int64_t columns,
                                                std::span<const float> entries) {
  return std::make_shared<DenseMap>(rows, columns, entries);
}

}  // namespace kvpool::methods
