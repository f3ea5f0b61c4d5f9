#pragma once

#include <functional>
#include <vector>

namespace kvpool::methods {

/// The `n_levels` (>= 1) numbers, ascending, that quantise a density on [low, high] with the least
/// mean squared error: each level is the mean of what lies nearest to it (Lloyd 1982, Max 1960).
/// `density` need not be normalised. Rounded to 11 significant bits, as half floats are, so that
/// machines whose exp() differs in the last bit agree.
std::vector<float> lloyd_max(const std::function<double(double)>& density, double low, double high,
                             int n_levels);

}  // namespace kvpool::methods
