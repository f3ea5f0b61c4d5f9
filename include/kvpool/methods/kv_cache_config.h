#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/formats/format.h"

namespace kvpool::methods {

/// What spectral learned from calibration data: for keys and for values the eigenvectors of their
/// covariance as the columns of a [head_dim, head_dim] matrix, most variance first, and how many of
/// them carry the signal.
struct SpectralCalibration {
  std::vector<float> key_vectors;
  std::vector<float> value_vectors;
  std::int64_t key_signal_dims = 1;
  std::int64_t value_signal_dims = 1;
};

/// A method and its parameters, named as in Python. make_method() checks them; the registry says
/// which method reads which.
struct KVCacheConfig {
  std::string method = "turboquant_mse";
  std::int64_t head_dim = 128;
  /// Bits of a key coordinate (of both streams for kivi and spectral).
  std::int64_t bit_width_inlier = 2;
  /// Bits of a value: 8 is a whole number and a scale a token, fewer are rotated and rounded to
  /// Lloyd-Max levels. The method's own choice where empty.
  std::optional<std::int64_t> value_bits;
  /// Signs of a sketch: rows of the random projection. The method's own choice where empty.
  std::optional<std::int64_t> jl_dim;
  std::int64_t seed = 42;
  /// Most tokens held; the oldest go first. Unlimited where empty.
  std::optional<std::int64_t> capacity;
  /// Newest tokens that stay exact. The method's own choice where empty: 128 for kivi, none else.
  std::optional<std::int64_t> residual_length;
  /// fp16, bf16 or fp32: what exact tokens are kept in.
  formats::Format precision = formats::Format::kFp16;
  /// Key channels of each head kept apart as int8: those of the largest mean magnitude over the
  /// first n_calib_tokens tokens, which stay exact until then. 0: none.
  std::int64_t n_outlier_channels = 0;
  std::int64_t n_calib_tokens = 200;
  std::int64_t kivi_group_size = 32;
  std::int64_t spectral_key_d_eff = 4;
  std::int64_t spectral_val_d_eff = 50;
  bool spectral_apply_qjl = true;
  std::shared_ptr<const SpectralCalibration> spectral_calibration;
  /// Bits of the four levels of angles. Chosen from bit_width_inlier where empty.
  std::optional<std::array<std::int64_t, 4>> polar_level_bits;
  /// Keys are scaled so that scores keep their size, instead of shrinking by the codes' error as
  /// published. Where empty: from 3 bits on. Below, it helps keys of models, whose attention is
  /// peaked, and costs some accuracy where attention is spread evenly.
  std::optional<bool> unbiased_scores;
  /// Every choice as published, where kvpool's own gives better quality in the same space.
  bool as_published = false;

  bool scores_are_unbiased() const noexcept {
    return unbiased_scores.value_or(!as_published && bit_width_inlier >= 3);
  }
};

}  // namespace kvpool::methods
