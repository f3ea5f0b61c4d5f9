#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace kvpool::methods {

using Vectors = std::vector<float>;

/// n * dims standard normal numbers.
inline Vectors normal_vectors(std::int64_t n, std::int64_t dims, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Vectors out(static_cast<std::size_t>(n * dims));
  for (float& number : out) number = normal(random);
  return out;
}

/// Queries that a single key answers: half of a random key, and noise.
inline Vectors peaked_queries(const Vectors& keys, std::int64_t n, std::int64_t dims,
                              unsigned seed) {
  Vectors queries = normal_vectors(n, dims, seed);
  std::mt19937 random(seed + 1);
  const auto n_keys = static_cast<std::int64_t>(keys.size()) / dims;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto key = static_cast<std::int64_t>(random()) % n_keys;
    for (std::int64_t j = 0; j < dims; ++j) {
      queries[static_cast<std::size_t>(i * dims + j)] +=
          0.5f * keys[static_cast<std::size_t>(key * dims + j)];
    }
  }
  return queries;
}

/// softmax(scale q K) V in double precision over tokens [first, last).
inline std::vector<double> exact_attention(const float* query, const float* keys,
                                           const float* values, std::int64_t first,
                                           std::int64_t last, std::int64_t dims) {
  std::vector<double> scores;
  for (std::int64_t t = first; t < last; ++t) {
    double score = 0;
    for (std::int64_t j = 0; j < dims; ++j) {
      score += static_cast<double>(query[j]) * static_cast<double>(keys[t * dims + j]);
    }
    scores.push_back(score / std::sqrt(static_cast<double>(dims)));
  }
  std::vector<double> out(static_cast<std::size_t>(dims));
  if (scores.empty()) return out;
  const double largest = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  for (std::size_t t = 0; t < scores.size(); ++t) {
    const double weight = std::exp(scores[t] - largest);
    total += weight;
    const float* value = values + (first + static_cast<std::int64_t>(t)) * dims;
    for (std::size_t j = 0; j < out.size(); ++j) out[j] += weight * static_cast<double>(value[j]);
  }
  for (double& number : out) number /= total;
  return out;
}

template <class A, class B>
double inner(const A* a, const B* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

template <class A, class B>
double cosine(const A* a, const B* b, std::int64_t n) {
  return inner(a, b, n) / std::sqrt(inner(a, a, n) * inner(b, b, n));
}

}  // namespace kvpool::methods
