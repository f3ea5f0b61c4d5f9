#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace kvpool::cache {

/// What the groups of a request's layers, pooled and paged, share about a step.

/// Trims by one amount, one a layer: all drop what the shortest layer can.
struct TrimRound {
  std::int64_t asked = -1;
  std::int64_t granted = 0;
};

/// Whether a step stopped half way: some layers have moved, and those from the first that has not
/// to the last are all still. `moved` tells of an element of `layers`.
template <class Layers, class Moved>
bool stopped_half_way(const Layers& layers, Moved moved) noexcept {
  const auto first_still = std::ranges::find_if_not(layers, moved);
  return first_still != layers.begin() && first_still != layers.end() &&
         std::none_of(first_still, layers.end(), moved);
}

/// The most tokens, fewer than `n_tokens`, of which `fits` is true; it is of all that are fewer.
template <class Fits>
std::int64_t tokens_that_fit(std::int64_t n_tokens, Fits fits) {
  std::int64_t fitting = 0;
  std::int64_t too_many = n_tokens;
  while (too_many - fitting > 1) {
    const std::int64_t middle = fitting + (too_many - fitting) / 2;
    (fits(middle) ? fitting : too_many) = middle;
  }
  return fitting;
}

/// `why`, for which step, and how many tokens fit.
std::string step_message(std::string why, std::int64_t n_tokens, std::int64_t n_layers,
                         std::int64_t fitting);

}  // namespace kvpool::cache
