// What every codec must do, for every method, width and head size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kvpool/methods/outlier_channels.h"
#include "kvpool/methods/registry.h"
#include "vectors.h"

namespace kvpool::methods {
namespace {

using kernels::RowKernels;

/// E|decoded - vector|^2 / E|vector|^2 of normal vectors of 128 numbers, by width: budgets a few
/// per cent above what the theory of each quantiser gives.
constexpr double kLevelError[] = {1.01,   0.375,   0.122,   0.0365, 0.0102,
                                  0.0028, 0.00075, 0.00021, 0.00007};
constexpr double kUnbiasedLevelError[] = {1.01,   0.60,    0.137,   0.0375, 0.0103,
                                          0.0028, 0.00075, 0.00021, 0.00007};
/// Signs of orthogonal projections, scaled to be exact along the vector: pi / 2 - 1, and the
/// levels' error before it.
constexpr double kSignError = 0.60;
constexpr double kPolarError[] = {1.01,   0.36,    0.112,   0.029,  0.0075,
                                  0.0020, 0.00052, 0.00014, 0.00010};
/// Grids between the extremes of 32 normal numbers, which one bit can do little with.
constexpr double kKiviKeyError[] = {1.01,   2.0,     0.165,    0.032,  0.0072,
                                    0.0018, 0.00045, 0.000115, 0.00004};
constexpr double kKiviValueError[] = {1.01,   0.45,    0.135,    0.032,  0.0072,
                                      0.0018, 0.00045, 0.000115, 0.00004};
constexpr double kInt8Error = 0.00006;
/// Against the norm: fp32 sums in another order.
constexpr double kRounding = 1e-5;

/// Decoded rows of code space.
struct Rows {
  std::int64_t stride;
  std::vector<float> data;

  const float* row(std::int64_t t) const { return data.data() + t * stride; }
};

struct Coded {
  const StreamCodec& codec;
  std::int64_t capacity;
  std::vector<std::byte> page;

  Coded(const StreamCodec& c, std::int64_t n) : codec(c), capacity(n) {
    page.resize(static_cast<std::size_t>(codec.page_bytes(capacity)));
    page.shrink_to_fit();  // so that a read past the end is caught
  }

  void encode(const Vectors& vectors, TokenRange range) {
    Vectors scratch(static_cast<std::size_t>(codec.scratch_floats(range.count)));
    codec.encode(vectors.data() + range.first * codec.head_dim(), codec.head_dim(), range,
                 {page.data(), capacity}, scratch.data());
  }

  Rows decode(TokenRange range, const RowKernels& kernels = kernels::row_kernels()) const {
    Rows rows{kernels::padded_row(codec.code_dims()), {}};
    rows.data.resize(static_cast<std::size_t>(range.count * rows.stride));
    Vectors scratch(static_cast<std::size_t>(codec.scratch_floats(range.count)));
    codec.decode({page.data(), capacity}, range, kernels, {rows.data.data(), rows.stride},
                 scratch.data());
    return rows;
  }

  Vectors vectors(TokenRange range, const RowKernels& kernels) const {
    const Rows rows = decode(range, kernels);
    Vectors out(static_cast<std::size_t>(range.count * codec.head_dim()));
    for (std::int64_t t = 0; t < range.count; ++t) {
      codec.leave(rows.row(t), out.data() + t * codec.head_dim());
    }
    return out;
  }
  Vectors vectors() const { return vectors({0, capacity}, kernels::row_kernels()); }
};

double relative_error(const Vectors& decoded, const Vectors& vectors) {
  double miss = 0;
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    miss += std::pow(static_cast<double>(decoded[i] - vectors[i]), 2);
  }
  return miss / inner(vectors.data(), vectors.data(), static_cast<std::int64_t>(vectors.size()));
}

/// Parameters that between them reach every path of a method's codecs.
std::vector<KVCacheConfig> configs_of(const std::string& method) {
  const MethodInfo& info = *find_method(method);
  std::vector<KVCacheConfig> configs;
  for (const std::int64_t dims : {1, 16, 48, 100, 128}) {
    if (dims % info.head_dim_multiple != 0 || (dims == 1 && method == "spectral")) continue;
    for (const std::int64_t bits : {1, 2, 3, 4, 5, 8}) {
      configs.push_back({.method = method,
                         .head_dim = dims,
                         .bit_width_inlier = bits,
                         .value_bits = bits,
                         .as_published = (dims / 16 + bits) % 2 == 0});
    }
  }
  const auto reads_jl_dim = [](const ParameterInfo& parameter) {
    return parameter.name == "jl_dim";
  };
  if (std::any_of(info.parameters.begin(), info.parameters.end(), reads_jl_dim)) {
    for (const std::int64_t signs : {1, 7, 40, 300}) {
      configs.push_back({.method = method, .head_dim = 64, .jl_dim = signs});
    }
  }
  return configs;
}

class CodecTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr std::int64_t kTokens = 64;

  /// test(config, codec, vectors) for both streams of every config.
  template <class Test>
  void for_every_codec(Test test) {
    for (const KVCacheConfig& config : configs_of(GetParam())) {
      const auto method = make_method(config);
      const Vectors vectors = normal_vectors(kTokens, config.head_dim, 23);
      for (const StreamCodec* codec : {method->keys.get(), method->values.get()}) {
        SCOPED_TRACE(testing::Message()
                     << (codec == method->keys.get() ? "keys" : "values") << " of "
                     << config.head_dim << " numbers, " << config.bit_width_inlier << " bits, "
                     << config.jl_dim.value_or(0) << " signs, published " << config.as_published);
        test(config, *codec, vectors);
      }
    }
  }
};

// The two ways to use a codec mean the same.
TEST_P(CodecTest, entering_code_space_is_the_adjoint_of_leaving_it) {
  for_every_codec(
      [](const KVCacheConfig& config, const StreamCodec& codec, const Vectors& vectors) {
        const std::int64_t dims = config.head_dim;
        Coded coded(codec, kTokens);
        coded.encode(vectors, {0, kTokens});
        const Rows rows = coded.decode({0, kTokens});
        const Vectors decoded = coded.vectors();
        const Vectors query = normal_vectors(1, dims, 5);
        Vectors entered(static_cast<std::size_t>(rows.stride));
        codec.enter(query.data(), entered.data());
        for (std::int64_t t = 0; t < kTokens; ++t) {
          const double in_code_space = inner(rows.row(t), entered.data(), codec.code_dims());
          const double in_space = inner(decoded.data() + t * dims, query.data(), dims);
          EXPECT_NEAR(in_code_space, in_space,
                      kRounding * (1 + static_cast<double>(dims)) * (1 + std::abs(in_space)));
        }
      });
}

TEST_P(CodecTest, field_G3_bytes_do_not_depend_on_how_tokens_are_cut) {
  for_every_codec([](const KVCacheConfig&, const StreamCodec& codec, const Vectors& vectors) {
    Coded at_once(codec, kTokens), in_parts(codec, kTokens);
    at_once.encode(vectors, {0, kTokens});
    for (std::int64_t t = 0; t < kTokens; t += codec.group()) {
      in_parts.encode(vectors, {t, codec.group()});
    }
    EXPECT_EQ(at_once.page, in_parts.page);
  });
}

TEST_P(CodecTest, every_kernel_and_every_range_decode_alike) {
  for_every_codec([](const KVCacheConfig& config, const StreamCodec& codec,
                     const Vectors& vectors) {
    Coded coded(codec, kTokens);
    coded.encode(vectors, {0, kTokens});
    const Vectors expected = coded.vectors({0, kTokens}, kernels::scalar_row_kernels());
    for (const RowKernels& kernels : kernels::all_row_kernels()) {
      for (const TokenRange range : {TokenRange{0, kTokens}, {5, 30}, {31, 2}, {kTokens - 1, 1}}) {
        const Vectors found = coded.vectors(range, kernels);
        for (std::size_t i = 0; i < found.size(); ++i) {
          const float want = expected[i + static_cast<std::size_t>(range.first * config.head_dim)];
          ASSERT_NEAR(found[i], want, 1e-5f * (1 + std::abs(want)))
              << kernels.target << ", range from " << range.first << ", number " << i;
        }
      }
    }
  });
}

TEST(OutlierChannels, what_they_add_is_in_the_codec_s_own_page) {
  const auto method = make_method({.head_dim = 64});
  const OutlierChannels codec(*method->keys, {3, 40, 63});
  EXPECT_EQ(codec.page_bytes(32), method->keys->page_bytes(32) + 32 * (2 + 3));
  Vectors vectors = normal_vectors(32, 64, 9);
  for (std::size_t t = 0; t < 32; ++t) vectors[t * 64 + 40] += 100;
  Coded coded(codec, 32);
  coded.encode(vectors, {0, 32});
  const Vectors decoded = coded.vectors();
  // Int8 of a range of 100; the other channels do not feel it.
  Vectors rest = vectors, decoded_rest = decoded;
  for (std::size_t t = 0; t < 32; ++t) {
    for (const std::size_t channel : {3u, 40u, 63u}) {
      EXPECT_NEAR(decoded[t * 64 + channel], vectors[t * 64 + channel], 0.5);
      rest[t * 64 + channel] = decoded_rest[t * 64 + channel] = 0;
    }
  }
  EXPECT_LT(relative_error(decoded_rest, rest), 0.14);

  const Vectors query = normal_vectors(1, 64, 5);
  const Rows rows = coded.decode({0, 32});
  Vectors entered(static_cast<std::size_t>(rows.stride));
  codec.enter(query.data(), entered.data());
  for (std::int64_t t = 0; t < 32; ++t) {
    EXPECT_NEAR(inner(rows.row(t), entered.data(), codec.code_dims()),
                inner(decoded.data() + t * 64, query.data(), 64), 1e-3);
  }
}

TEST(OutlierChannels, the_largest_are_chosen_and_of_equal_ones_the_first) {
  EXPECT_EQ(OutlierChannels::largest({1, 5, 2, 5, 0, 2}, 3), (std::vector<std::int64_t>{1, 2, 3}));
}

TEST_P(CodecTest, vectors_of_any_size_keep_their_direction_and_zero_stays_zero) {
  for_every_codec(
      [](const KVCacheConfig& config, const StreamCodec& codec, const Vectors& vectors) {
        Coded normal(codec, kTokens);
        normal.encode(vectors, {0, kTokens});
        const double error = relative_error(normal.vectors(), vectors);
        for (const float size : {0x1p-24f, 1e-3f, 1e4f, 0x1p20f}) {
          // Zeros of kivi are half floats, which end before.
          if (config.method == "kivi" && (size < 1e-3f || size > 1e4f)) continue;
          Vectors scaled = vectors;
          for (float& number : scaled) number *= size;
          Coded coded(codec, kTokens);
          coded.encode(scaled, {0, kTokens});
          EXPECT_NEAR(relative_error(coded.vectors(), scaled), error, 0.02 * error + 2e-6) << size;
        }
        Coded zeros(codec, kTokens);
        zeros.encode(Vectors(vectors.size()), {0, kTokens});
        for (const float number : zeros.vectors()) ASSERT_EQ(number, 0);
      });
}

INSTANTIATE_TEST_SUITE_P(methods, CodecTest, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const MethodInfo& row : methods()) names.emplace_back(row.name);
                           return names;
                         }()),
                         [](const auto& tested) { return tested.param; });

class CodecErrorTest : public testing::TestWithParam<int> {
 protected:
  static constexpr std::int64_t kDims = 128;
  static constexpr std::int64_t kTokens = 512;

  Vectors vectors = normal_vectors(kTokens, kDims, 31);
  int bits = GetParam();

  double error(const StreamCodec& codec) const {
    Coded coded(codec, kTokens);
    coded.encode(vectors, {0, kTokens});
    return relative_error(coded.vectors(), vectors);
  }
  std::shared_ptr<const Method> made(const char* name) const {
    // Not in one initialiser: UBSan of g++ 12 takes its `bits` for a null object's.
    KVCacheConfig config;
    config.method = name;
    config.bit_width_inlier = bits;
    config.value_bits = bits;
    return make_method(config);
  }
};

TEST_P(CodecErrorTest, stays_within_its_budget) {
  const double keys_budget = bits >= 3 ? kUnbiasedLevelError[bits] : kLevelError[bits];
  EXPECT_LT(error(*made("turboquant_mse")->keys), keys_budget);
  EXPECT_LT(error(*made("spectral")->keys), kUnbiasedLevelError[bits]);
  EXPECT_LT(error(*made("spectral")->values), kLevelError[bits]);
  EXPECT_LT(error(*made("polar")->values), bits == 8 ? kInt8Error : kLevelError[bits]);
  EXPECT_LT(error(*made("polar")->keys), kPolarError[bits]);
  EXPECT_LT(error(*made("kivi")->keys), kKiviKeyError[bits]);
  EXPECT_LT(error(*made("kivi")->values), kKiviValueError[bits]);
  EXPECT_LT(error(*made("turboquant_prod")->keys), kSignError * kLevelError[bits - 1]);
}

TEST_P(CodecErrorTest, of_published_choices_is_what_was_published) {
  const auto published = [&](const char* name) {
    return make_method({.method = name, .bit_width_inlier = bits, .as_published = true});
  };
  constexpr double kPublishedMse[] = {1, 0.361, 0.116, 0.0340, 0.00936};
  constexpr double kPublishedPolar[] = {1, 0.77, 0.22, 0.056, 0.014};
  if (bits > 4) return;
  EXPECT_NEAR(error(*published("turboquant_mse")->keys), kPublishedMse[bits],
              0.03 * kPublishedMse[bits]);
  EXPECT_NEAR(error(*published("polar")->keys), kPublishedPolar[bits],
              0.06 * kPublishedPolar[bits]);
}

INSTANTIATE_TEST_SUITE_P(bits, CodecErrorTest, testing::Range(1, 9));

// KIVI's grid, read off the numbers it gives back.

TEST(Kivi, field_G1_a_head_of_96_numbers_has_no_dead_lanes_in_its_range) {
  const auto method = make_method({.method = "kivi", .head_dim = 96, .bit_width_inlier = 4});
  constexpr float kStep = 2.0f / 15;
  Vectors vectors(32 * 96);
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    vectors[i] = 5 + static_cast<float>((i * 7) % 33) / 16;
  }
  for (const StreamCodec* codec : {method->keys.get(), method->values.get()}) {
    Coded coded(*codec, 32);
    coded.encode(vectors, {0, 32});
    const Vectors decoded = coded.vectors();
    for (std::size_t i = 0; i < vectors.size(); ++i) {
      EXPECT_LE(std::abs(decoded[i] - vectors[i]), kStep / 2 + 1e-4f);
    }
  }
}

TEST(Kivi, field_G2_groups_of_64_channels_shrink_to_a_divisor_of_96) {
  const auto method =
      make_method({.method = "kivi", .head_dim = 96, .bit_width_inlier = 2, .kivi_group_size = 64});
  // Three groups of 32: 4 bytes each, and 24 bytes of codes.
  EXPECT_EQ(method->values->page_bytes(1), 3 * 4 + 24);
}

TEST(Kivi, smallest_and_largest_number_of_a_group_are_exact_at_their_ends) {
  const auto method = make_method({.method = "kivi", .head_dim = 32, .bit_width_inlier = 3});
  Vectors vectors = normal_vectors(32, 32, 3);
  for (float& number : vectors) number = std::round(number * 64) / 64;  // exact in fp16
  Coded coded(*method->keys, 32);
  coded.encode(vectors, {0, 32});
  const Vectors decoded = coded.vectors();
  for (std::size_t channel = 0; channel < 32; ++channel) {
    float low = vectors[channel];
    for (std::size_t t = 0; t < 32; ++t) low = std::min(low, vectors[t * 32 + channel]);
    for (std::size_t t = 0; t < 32; ++t) {
      if (vectors[t * 32 + channel] == low) {
        EXPECT_EQ(decoded[t * 32 + channel], low);
      }
    }
  }
}

}  // namespace
}  // namespace kvpool::methods
