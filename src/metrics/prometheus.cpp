#include "kvpool/metrics/prometheus.h"

#include <algorithm>
#include <cmath>

#include "kvpool/base/error.h"

namespace kvpool::metrics {

namespace {

// Not the <cctype> functions: those depend on the locale.
bool is_name(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == ':';
  };
  const auto is_part = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9'); };
  return !text.empty() && is_letter(text.front()) && std::all_of(text.begin(), text.end(), is_part);
}

/// A share with six decimals, rounded to nearest, whatever the locale.
std::string share(double value) {
  if (value < 0) return "-" + share(-value);  // of stats made by hand
  const long long millionths = std::llround(value * 1e6);
  const std::string digits = std::to_string(millionths % 1'000'000);
  return std::to_string(millionths / 1'000'000) + "." + std::string(6 - digits.size(), '0') +
         digits;
}

}  // namespace

std::string to_prometheus(const core::AllocationStats& stats, std::string_view prefix) {
  if (!is_name(prefix)) {
    throw InvalidArgument("[to_prometheus] prefix must match [a-zA-Z_:][a-zA-Z0-9_:]*, got '" +
                          std::string(prefix) + "'");
  }
  std::string text;
  const auto add = [&](std::string_view type, std::string_view metric, const std::string& value) {
    const std::string name = std::string(prefix) + "_" + std::string(metric);
    text += "# TYPE " + name + " " + std::string(type) + "\n" + name + " " + value + "\n";
  };
  const auto gauge = [&](std::string_view metric, std::int64_t value) {
    add("gauge", metric, std::to_string(value));
  };
  const auto counter = [&](std::string_view metric, std::int64_t value) {
    add("counter", metric, std::to_string(value));
  };
  gauge("blocks_in_use", stats.blocks_in_use());
  gauge("blocks_total", stats.n_blocks);
  add("gauge", "fragmentation", share(stats.fragmentation()));
  gauge("peak_blocks_in_use", stats.peak_blocks_in_use);
  counter("allocations_total", stats.n_allocations);
  counter("frees_total", stats.n_frees);
  counter("reused_total", stats.n_reused);
  counter("exhausted_total", stats.n_exhausted);
  counter("grown_total", stats.n_grown);
  counter("retired_total", stats.n_retired);
  gauge("unused_slots", stats.unused_slots());
  return text;
}

}  // namespace kvpool::metrics
