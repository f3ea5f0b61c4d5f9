#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvpool::methods {

/// Most numbers that a rotated vector may have: scratch space for one is on the stack.
inline constexpr std::int64_t kMaxDims = 1024;

/// A fixed linear map. Its results are the same bits on every machine: sums are formed in one order
/// and nothing is fused.
class LinearMap {
 public:
  LinearMap(std::int64_t rows, std::int64_t columns) noexcept : rows_(rows), columns_(columns) {}
  virtual ~LinearMap() = default;

  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t columns() const noexcept { return columns_; }

  /// out [rows] = M in [columns]. They do not overlap.
  virtual void apply(const float* in, float* out) const noexcept = 0;
  /// out [columns] = M^T in [rows]. They do not overlap.
  virtual void apply_transposed(const float* in, float* out) const noexcept = 0;
  /// What the map itself takes.
  virtual std::int64_t memory_bytes() const noexcept = 0;

 private:
  std::int64_t rows_;
  std::int64_t columns_;
};

enum class RotationKind : std::uint8_t {
  /// Three rounds of random signs and a Hadamard transform, in n log n steps: as good as a uniform
  /// one for quantisation. Where `dims` is no power of two, kHaar takes its place.
  kHadamard,
  /// Uniform over all rotations, by orthogonalising a Gaussian matrix; n^2 steps and memory.
  kHaar,
};

/// A random orthogonal map of `dims` numbers, 1..kMaxDims.
std::shared_ptr<const LinearMap> make_rotation(std::int64_t dims, std::uint64_t seed,
                                               RotationKind kind = RotationKind::kHadamard);

enum class ProjectionKind : std::uint8_t {
  /// Rows of random rotations, scaled to the length of Gaussian ones: rows of one rotation do not
  /// repeat each other, so signs of projections say more.
  kOrthogonal,
  /// Independent standard normal entries.
  kGaussian,
};

/// A random map of `dims` numbers to `n_rows`, whose entries have variance one.
std::shared_ptr<const LinearMap> make_projection(std::int64_t n_rows, std::int64_t dims,
                                                 std::uint64_t seed,
                                                 ProjectionKind kind = ProjectionKind::kOrthogonal);

/// The map of a matrix, `entries` [rows, columns].
std::shared_ptr<const LinearMap> make_dense_map(std::int64_t rows, std::int64_t columns,
                                                std::span<const float> entries);

}  // namespace kvpool::methods
