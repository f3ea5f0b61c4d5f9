#include "core/format_names.h"

#include <gtest/gtest.h>

#include "kvpool/base/error.h"

namespace kvpool::core {
namespace {

TEST(FormatNames, fp16_is_tag_0_in_every_pool) {
  FormatNames names;
  EXPECT_EQ(names.intern("fp16"), FormatTag{0});
  EXPECT_EQ(names.name(FormatTag{0}), "fp16");
}

TEST(FormatNames, equal_names_have_one_tag) {
  FormatNames names;
  const FormatTag tag = names.intern("int4");
  EXPECT_FALSE(names.contains(FormatTag{2}));
  EXPECT_NE(names.intern("int8"), tag);
  EXPECT_EQ(names.intern("int4"), tag);
  EXPECT_EQ(names.name(tag), "int4");
}

TEST(FormatNames, refuses_the_65536th_name_and_goes_on_with_the_others) {
  FormatNames names;
  for (int i = 1; i < 65'535; ++i) names.intern("f" + std::to_string(i));
  EXPECT_THROW(names.intern("one more"), Error);
  EXPECT_EQ(names.intern("f65534"), FormatTag{65'534});
}

}  // namespace
}  // namespace kvpool::core
