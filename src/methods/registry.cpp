#include "kvpool/methods/registry.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/methods/kivi.h"
#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/polar.h"
#include "kvpool/methods/qjl.h"
#include "kvpool/methods/spectral.h"
#include "kvpool/methods/turboquant_mse.h"
#include "kvpool/methods/turboquant_prod.h"

namespace kvpool::methods {
namespace {

constexpr ParameterInfo kValueBits{"value_bits", "8", "1..8",
                                   "bits of a value; below 8 values are rotated and rounded to "
                                   "Lloyd-Max levels"};
constexpr ParameterInfo kAsPublished{"as_published", "False", "",
                                     "every choice as published, where ours is better"};
constexpr ParameterInfo kUnbiasedScores{
    "unbiased_scores", "from 3 bits on", "",
    "keys are scaled so that scores do not shrink by the codes' error"};
constexpr ParameterInfo kJlDim{"jl_dim", "head_dim", ">= 1", "signs of the sketch"};

constexpr ParameterInfo kOutliers{
    "n_outlier_channels", "None", "0..head_dim - 1",
    "key channels kept apart as int8, with enable_outlier_two_stream"};
constexpr ParameterInfo kCalibTokens{"n_calib_tokens", "200", ">= 1",
                                     "tokens after which those channels are chosen"};

constexpr ParameterInfo kMseParameters[] = {kUnbiasedScores, kOutliers, kCalibTokens, kValueBits,
                                            kAsPublished};
constexpr ParameterInfo kProdParameters[] = {kJlDim, kOutliers, kCalibTokens, kValueBits,
                                             kAsPublished};
constexpr ParameterInfo kPolarParameters[] = {
    {"polar_level_bits", "from bit_width_inlier", "1..8, then 0..8 three times",
     "bits of the angles of each level"},
    kUnbiasedScores,
    kOutliers,
    kCalibTokens,
    kValueBits,
    kAsPublished};
constexpr ParameterInfo kSpectralParameters[] = {
    {"spectral_key_d_eff", "4", ">= 1, at most head_dim - 1 are used",
     "signal coordinates of a key"},
    {"spectral_val_d_eff", "50", ">= 1, at most head_dim - 1 are used",
     "signal coordinates of a value"},
    {"spectral_apply_qjl", "True", "", "keys keep a sign sketch of the signal's error"},
    kUnbiasedScores,
    kOutliers,
    kCalibTokens,
    kAsPublished};
constexpr ParameterInfo kKiviParameters[] = {
    {"kivi_group_size", "32", ">= 1",
     "tokens of a group of keys; values use the largest divisor "
     "it shares with head_dim"},
    {"value_bits", "bit_width_inlier", "1..8", "bits of a value"},
    kAsPublished};

constexpr MethodInfo kMethods[] = {
    {.name = "turboquant_mse",
     .title = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
     .authors = "Zandieh, Daliri, Hadian, Mirrokni",
     .arxiv = "2504.19874",
     .summary = "Rotates a key at random and rounds each coordinate to a Lloyd-Max level",
     .parameters = kMseParameters,
     .make = make_turboquant_mse},
    {.name = "turboquant_prod",
     .title = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
     .authors = "Zandieh, Daliri, Hadian, Mirrokni",
     .arxiv = "2504.19874",
     .summary = "turboquant_mse with one bit less and a sign sketch of its error: unbiased scores",
     .parameters = kProdParameters,
     .make = make_turboquant_prod},
    {.name = "polar",
     .title = "PolarQuant: Quantizing KV Caches with Polar Transformation",
     .authors = "Han, Kacham, Karbasi, Mirrokni, Zandieh",
     .arxiv = "2502.02617",
     .summary = "Rotates a key at random and rounds the angles of a tree of polar coordinates",
     .head_dim_multiple = 1 << Polar::kLevels,
     .parameters = kPolarParameters,
     .make = make_polar},
    {.name = "qjl",
     .title = "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
     .authors = "Zandieh, Daliri, Han",
     .arxiv = "2406.03482",
     .summary =
         "Keeps the signs of random projections of a key and its norm; jl_dim sets the size, "
         "bit_width_inlier is not read",
     .parameters = kProdParameters,
     .make = make_qjl},
    {.name = "spectral",
     .title = "3% Is All You Need: Breaking TurboQuant's Compression Limit via Spectral Structure",
     .authors = "Gopinath",
     .arxiv = "",
     .summary = "Rounds the strongest coordinates of calibration data's eigenbasis and the rest "
                "apart, keys and values alike",
     .parameters = kSpectralParameters,
     .make = make_spectral},
    {.name = "kivi",
     .title = "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
     .authors = "Liu, Yuan, Jin, Zhong, Xu, Braverman, Chen, Hu",
     .arxiv = "2402.02750",
     .summary = "Rounds keys by channel and values by token between the ends of small groups; the "
                "newest tokens stay exact",
     .default_residual_length = 128,
     .parameters = kKiviParameters,
     .make = make_kivi},
};

void require(bool holds, std::string_view parameter, const std::string& limits,
             std::int64_t value) {
  if (holds) return;
  throw InvalidArgument("[KVCacheConfig] " + std::string(parameter) + " must be " + limits +
                        ", got " + std::to_string(value));
}

void require_within(std::string_view parameter, std::int64_t low, std::int64_t high,
                    std::int64_t value, const std::string& why = "") {
  require(value >= low && value <= high, parameter,
          std::to_string(low) + ".." + std::to_string(high) + why, value);
}

const MethodInfo& method_of(const KVCacheConfig& config) {
  if (const MethodInfo* info = find_method(config.method)) return *info;
  std::string names;
  for (const MethodInfo& info : kMethods)
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  throw InvalidArgument("[KVCacheConfig] method must be one of " + names + ", got '" +
                        config.method + "'");
}

void check(const KVCacheConfig& config, const MethodInfo& info) {
  constexpr std::int64_t kMostSigns = 1 << 16;
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
  const std::string for_method = " for " + std::string(info.name);
  require_within("head_dim", 1, kMaxDims, config.head_dim);
  require(config.head_dim % info.head_dim_multiple == 0, "head_dim",
          "a multiple of " + std::to_string(info.head_dim_multiple) + for_method, config.head_dim);
  require_within("bit_width_inlier", info.min_bits, info.max_bits, config.bit_width_inlier,
                 for_method);
  if (config.value_bits) require_within("value_bits", 1, 8, *config.value_bits);
  if (config.jl_dim) require_within("jl_dim", 1, kMostSigns, *config.jl_dim);
  if (config.capacity) require_within("capacity", 1, kMostTokens, *config.capacity);
  if (config.residual_length) {
    require_within("residual_length", 0, kMostTokens, *config.residual_length);
  }
  if (formats::traits(config.precision).kind != formats::Kind::kFloat) {
    throw InvalidArgument("[KVCacheConfig] precision must be fp32, fp16 or bf16, got " +
                          std::string(formats::traits(config.precision).name));
  }
  if (config.n_outlier_channels != 0) {
    require(info.name != "kivi", "n_outlier_channels", "0 for kivi, whose groups are channels",
            config.n_outlier_channels);
    require_within("n_outlier_channels", 0, config.head_dim - 1, config.n_outlier_channels);
  }
  require_within("n_calib_tokens", 1, kMostTokens, config.n_calib_tokens);
  if (info.name == "kivi") require_within("kivi_group_size", 1, 1 << 12, config.kivi_group_size);
  if (info.name == "spectral") {
    const std::int64_t dims = config.head_dim;
    require(dims >= 2, "head_dim", ">= 2 for spectral", dims);
    if (const SpectralCalibration* calibration = config.spectral_calibration.get()) {
      const auto entries = static_cast<std::size_t>(dims * dims);
      require(calibration->key_vectors.size() == entries &&
                  calibration->value_vectors.size() == entries,
              "spectral_calibration", "two matrices of head_dim * head_dim numbers",
              static_cast<std::int64_t>(calibration->key_vectors.size()));
      require_within("key_signal_dims", 1, dims - 1, calibration->key_signal_dims);
      require_within("value_signal_dims", 1, dims - 1, calibration->value_signal_dims);
    } else {
      require(config.spectral_key_d_eff >= 1, "spectral_key_d_eff", ">= 1",
              config.spectral_key_d_eff);
      require(config.spectral_val_d_eff >= 1, "spectral_val_d_eff", ">= 1",
              config.spectral_val_d_eff);
    }
  }
  if (config.polar_level_bits) {
    for (std::size_t level = 0; level < config.polar_level_bits->size(); ++level) {
      require_within("polar_level_bits[" + std::to_string(level) + "]", level == 0 ? 1 : 0, 8,
                     (*config.polar_level_bits)[level]);
    }
  }
}

}  // namespace

std::span<const MethodInfo> methods() noexcept { return kMethods; }

const MethodInfo* find_method(std::string_view name) noexcept {
  const auto* found = std::find_if(std::begin(kMethods), std::end(kMethods),
                                   [&](const MethodInfo& info) { return info.name == name; });
  return found == std::end(kMethods) ? nullptr : found;
}

std::shared_ptr<const Method> make_method(KVCacheConfig config) {
  const MethodInfo& info = method_of(config);
  check(config, info);
  if (!config.residual_length) config.residual_length = info.default_residual_length;
  return std::make_shared<const Method>(info.make(config));
}

}  // namespace kvpool::methods
