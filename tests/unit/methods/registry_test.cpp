#include "kvpool/methods/registry.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool::methods {
namespace {

std::string refusal(const KVCacheConfig& config) {
  try {
    make_method(config);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "made";
}

TEST(Registry, every_method_is_found_by_its_name_and_can_be_made) {
  std::set<std::string_view> names;
  for (const MethodInfo& info : methods()) {
    EXPECT_TRUE(names.insert(info.name).second);
    EXPECT_EQ(find_method(info.name), &info);
    EXPECT_EQ(refusal({.method = std::string(info.name)}), "made");
  }
  EXPECT_EQ(find_method("turboquant"), nullptr);
}

TEST(Registry, unknown_method_is_refused_with_the_names_there_are) {
  std::string names;
  for (const MethodInfo& info : methods()) {
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  }
  EXPECT_EQ(refusal({.method = "foo"}),
            "[KVCacheConfig] method must be one of " + names + ", got 'foo'");
}

TEST(Registry, fault_F45_every_width_works_and_others_are_refused_by_name) {
  for (const MethodInfo& info : methods()) {
    for (std::int64_t bits = info.min_bits; bits <= info.max_bits; ++bits) {
      EXPECT_EQ(refusal({.method = std::string(info.name), .bit_width_inlier = bits}), "made");
    }
    EXPECT_EQ(
        refusal({.method = std::string(info.name), .bit_width_inlier = info.max_bits + 1}),
        "[KVCacheConfig] bit_width_inlier must be 1..8 for " + std::string(info.name) + ", got 9");
    EXPECT_NE(refusal({.method = std::string(info.name), .bit_width_inlier = 0}), "made");
  }
}

TEST(Registry, fault_F46_head_dim_is_limited_only_where_a_method_needs_it) {
  for (const MethodInfo& info : methods()) {
    for (const std::int64_t dims : {80, 96, 192, 256}) {
      EXPECT_EQ(refusal({.method = std::string(info.name), .head_dim = dims}), "made");
    }
  }
  EXPECT_EQ(refusal({.method = "polar", .head_dim = 72}),
            "[KVCacheConfig] head_dim must be a multiple of 16 for polar, got 72");
  EXPECT_EQ(refusal({.method = "turboquant_mse", .head_dim = 1}), "made");
  EXPECT_EQ(refusal({.method = "kivi", .head_dim = 0}),
            "[KVCacheConfig] head_dim must be 1..1024, got 0");
}

TEST(Registry, fault_F46_a_sketch_may_have_more_signs_than_the_key_has_numbers) {
  EXPECT_EQ(refusal({.method = "turboquant_prod", .jl_dim = 512}), "made");
  EXPECT_EQ(refusal({.method = "turboquant_prod", .jl_dim = 1}), "made");
  EXPECT_EQ(refusal({.method = "turboquant_prod", .jl_dim = 0}),
            "[KVCacheConfig] jl_dim must be 1..65536, got 0");
}

TEST(Registry, names_the_parameter_that_is_out_of_range) {
  EXPECT_EQ(refusal({.value_bits = 9}), "[KVCacheConfig] value_bits must be 1..8, got 9");
  EXPECT_EQ(refusal({.capacity = -1}), "[KVCacheConfig] capacity must be 1..1099511627776, got -1");
  EXPECT_EQ(refusal({.method = "kivi", .kivi_group_size = 0}),
            "[KVCacheConfig] kivi_group_size must be 1..4096, got 0");
  EXPECT_EQ(refusal({.method = "spectral", .spectral_key_d_eff = 0}),
            "[KVCacheConfig] spectral_key_d_eff must be >= 1, got 0");
  EXPECT_EQ(refusal({.head_dim = 64, .n_outlier_channels = 64}),
            "[KVCacheConfig] n_outlier_channels must be 0..63, got 64");
  EXPECT_EQ(refusal({.method = "kivi", .n_outlier_channels = 2}),
            "[KVCacheConfig] n_outlier_channels must be 0 for kivi, whose groups are channels, "
            "got 2");
  EXPECT_EQ(refusal({.precision = formats::Format::kInt4}),
            "[KVCacheConfig] precision must be fp32, fp16 or bf16, got int4");
  EXPECT_EQ(refusal({.method = "polar", .polar_level_bits = {{0, 1, 1, 1}}}),
            "[KVCacheConfig] polar_level_bits[0] must be 1..8, got 0");
}

// Keys and values of 128 numbers with values at 8 bits where the method has a choice.
TEST(Registry, bytes_of_a_token_are_what_the_codes_need) {
  const auto bytes = [](const char* name, std::int64_t bits) {
    return coded_bytes_per_token(*make_method({.method = name, .bit_width_inlier = bits}));
  };
  EXPECT_EQ(bytes("turboquant_mse", 2), 164);
  EXPECT_EQ(bytes("turboquant_mse", 4), 196);
  EXPECT_EQ(bytes("turboquant_prod", 2), 166);
  EXPECT_EQ(bytes("turboquant_prod", 3), 182);
  EXPECT_EQ(bytes("polar", 2), 175);
  EXPECT_EQ(bytes("spectral", 2), 76);
  EXPECT_EQ(bytes("kivi", 2), 96);
}

TEST(Registry, fault_F45_packed_key_codes_take_the_bytes_they_should) {
  const auto key_bytes = [](KVCacheConfig config) {
    return make_method(config)->keys->page_bytes(1);
  };
  EXPECT_EQ(key_bytes({.method = "polar", .as_published = true}), 46);
  EXPECT_EQ(key_bytes({.method = "polar"}), 45);
  EXPECT_NE(key_bytes({.method = "turboquant_prod", .bit_width_inlier = 1}),
            key_bytes({.method = "turboquant_prod", .bit_width_inlier = 2}));
}

}  // namespace
}  // namespace kvpool::methods
