// Random calls against a model that knows only which token has which value.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/methods/quantized_kv_cache.h"
#include "kvpool/methods/registry.h"

namespace kvpool::methods {
namespace {

constexpr std::int64_t kDims = 16;

/// Tokens are constant vectors: key 0, so that attention is the mean of the values seen.
struct Model {
  std::optional<std::int64_t> capacity;
  std::deque<float> values;
  std::int64_t appended = 0;
  bool key_waits = false;

  void append(float value) {
    values.push_back(value);
    ++appended;
    if (capacity && static_cast<std::int64_t>(values.size()) > *capacity) values.pop_front();
  }

  /// Of those at positions before `end`.
  float mean(std::int64_t end) const {
    const auto n =
        std::clamp<std::int64_t>(end - (appended - static_cast<std::int64_t>(values.size())), 0,
                                 static_cast<std::int64_t>(values.size()));
    float sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += values[static_cast<std::size_t>(i)];
    return n == 0 ? 0 : sum / static_cast<float>(n);
  }
};

bool refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument&) {
    return true;
  }
  return false;
}

void check_random_calls() {
  const auto& info = methods()[*rc::gen::inRange<std::size_t>(0, methods().size())];
  KVCacheConfig config{.method = std::string(info.name), .head_dim = kDims, .bit_width_inlier = 8};
  if (*rc::gen::arbitrary<bool>()) config.capacity = *rc::gen::inRange(1, 120);
  if (*rc::gen::arbitrary<bool>()) config.residual_length = *rc::gen::inRange(0, 80);
  if (info.name != "kivi" && *rc::gen::arbitrary<bool>()) {
    config.n_outlier_channels = *rc::gen::inRange(1, 4);
    config.n_calib_tokens = *rc::gen::inRange(1, 60);
  }
  QuantizedKVCache cache(config);
  Model model{.capacity = config.capacity};
  const std::vector<float> zeros(kDims * 70);

  const auto n_steps = *rc::gen::inRange(1, 40);
  for (int step = 0; step < n_steps; ++step) {
    const auto value = static_cast<float>(*rc::gen::inRange(-8, 9));
    const std::vector<float> row(kDims, value);
    switch (*rc::gen::inRange(0, 7)) {
      case 0: {
        const auto n = *rc::gen::inRange<std::int64_t>(0, 70);
        const std::vector<float> rows(static_cast<std::size_t>(n * kDims), value);
        RC_ASSERT(model.key_waits ==
                  refused([&] { cache.append(zeros.data(), rows.data(), {}, n); }));
        if (!model.key_waits) {
          for (std::int64_t t = 0; t < n; ++t) model.append(value);
        }
        break;
      }
      case 1:
      case 2:
        RC_ASSERT(model.key_waits == refused([&] { cache.append_key(zeros.data()); }));
        model.key_waits = true;
        break;
      case 3:
      case 4:
        RC_ASSERT(model.key_waits != refused([&] { cache.append_value(row.data()); }));
        if (model.key_waits) model.append(value);
        model.key_waits = false;
        break;
      case 5:
        cache.discard_key();
        model.key_waits = false;
        break;
      default:
        if (*rc::gen::inRange(0, 8) != 0) break;
        cache.reset();
        model = {.capacity = config.capacity};
    }
    cache.check_invariants();
    RC_ASSERT(cache.size() == static_cast<std::int64_t>(model.values.size()));
    RC_ASSERT(cache.end() == model.appended);
    RC_ASSERT(cache.has_pending_key() == model.key_waits);
    const auto offset = *rc::gen::inRange<std::int64_t>(-2, 300);
    std::vector<float> output(2 * kDims);
    cache.attend({.data = row.data(), .n_queries = 1, .causal_offset = offset}, output.data());
    cache.attend({.data = row.data()}, output.data() + kDims);
    for (std::size_t i = 0; i < kDims; ++i) {
      RC_ASSERT(std::abs(output[i] - model.mean(offset + 1)) < 0.1f);
      RC_ASSERT(std::abs(output[kDims + i] - model.mean(model.appended)) < 0.1f);
    }
  }
}

TEST(QuantizedKVCacheProperty, follows_a_model_through_random_calls) {
  rc::detail::TestParams params;
  params.seed = 20250611;
  params.maxSuccess = 100;
  const auto result =
      rc::detail::checkTestable(check_random_calls, rc::detail::TestMetadata(), params);
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  EXPECT_TRUE(result.is<rc::detail::SuccessResult>()) << text.str();
}

}  // namespace
}  // namespace kvpool::methods
