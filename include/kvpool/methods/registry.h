#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "kvpool/methods/method.h"

namespace kvpool::methods {

/// A parameter that a method reads: a field of KVCacheConfig.
struct ParameterInfo {
  std::string_view name;
  /// As Python writes it.
  std::string_view default_value;
  std::string_view limits;
  std::string_view what;
};

/// What documentation, the command line and Python know of a method: a row of the registry.
struct MethodInfo {
  /// How users name it.
  std::string_view name;
  std::string_view title;
  std::string_view authors;
  /// arXiv id, empty where none was found.
  std::string_view arxiv;
  /// How it works, in a sentence.
  std::string_view summary;
  std::int64_t min_bits = 1;
  std::int64_t max_bits = 8;
  /// head_dim is a multiple of this.
  std::int64_t head_dim_multiple = 1;
  /// Where KVCacheConfig leaves it open.
  std::int64_t default_residual_length = 0;
  /// Those besides what every method reads: head_dim, bit_width_inlier, seed, capacity,
  /// residual_length, precision.
  std::span<const ParameterInfo> parameters;
  /// Makes the codecs from a checked config.
  Method (*make)(const KVCacheConfig& config) = nullptr;
};

/// Every method, in the order in which lists show them.
std::span<const MethodInfo> methods() noexcept;

/// nullptr for a name that is not in the registry.
const MethodInfo* find_method(std::string_view name) noexcept;

/// Checks every parameter and makes the method, its open choices filled in. Throws InvalidArgument
/// naming the parameter, its limits and its value.
std::shared_ptr<const Method> make_method(KVCacheConfig config);

}  // namespace kvpool::methods
