// What validate() refuses, and pages far away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/kernels/page_append.h"
#include "kvpool/kernels/paged_attention.h"
#include "paged_problem.h"

namespace kvpool::kernels {
namespace {

using formats::Format;

void expect_refused(const std::function<void(PagedAttentionParams&)>& spoil,
                    const std::string& message) {
  PagedData data({.lengths = {65, 16}});
  PagedAttentionParams params = data.params();
  spoil(params);
  try {
    validate(params);
    ADD_FAILURE() << "accepted; should say " << message;
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(message));
    EXPECT_THAT(error.what(), testing::StartsWith("[paged_attention"));
  }
}

TEST(PagedAttentionValidate, what_the_tests_run_is_accepted) {
  PagedData data({.lengths = {65, 16}, .n_queries = 3, .sinks = true, .mask = MaskKind::kBf16});
  EXPECT_NO_THROW(validate(data.params()));
}

TEST(PagedAttentionValidate, field_G10_page_numbers_past_the_pages_are_refused) {
  std::int32_t indices[] = {0, 1, 2, 3, 4, 6};
  expect_refused([&](auto& p) { p.indices = indices; },
                 "indices[5] names page 6, but keys has 6 pages");
  indices[5] = -1;
  expect_refused([&](auto& p) { p.indices = indices; }, "indices[5] names page -1");
  // Four pages of 16 do not hold 65 tokens.
  const std::int32_t indptr[] = {0, 4, 5};
  const std::int32_t last[] = {17, 16};
  expect_refused(
      [&](auto& p) {
        p.indptr = indptr;
        p.last_page_len = last;
      },
      "last_page_len[0] must be in 1..16, got 17");
  expect_refused([](auto& p) { p.values.n_pages = 3; }, "but values has 3 pages");
}

TEST(PagedAttentionValidate, field_G11_last_pages_hold_one_token_to_a_full_block) {
  PagedData data({.lengths = {16, 17}});
  EXPECT_EQ(data.params().last_page_len[0], 16);
  EXPECT_EQ(data.params().last_page_len[1], 1);
  const std::int32_t none[] = {1, 0};
  expect_refused([&](auto& p) { p.last_page_len = none; },
                 "last_page_len[1] must be in 1..16, got 0");
  // A sequence without tokens is to be left out.
  const std::int32_t empty[] = {0, 5, 5};
  expect_refused([&](auto& p) { p.indptr = empty; }, "indptr[2] must be >= 6, got 5");
}

TEST(PagedAttentionValidate, shapes_and_pointers_that_do_not_fit_are_refused) {
  expect_refused([](auto& p) { p.query_format = Format::kInt8; },
                 "query_format must be fp32, fp16 or bf16, got int8");
  expect_refused([](auto& p) { p.n_q_heads = 3; },
                 "n_q_heads must be a multiple of keys.n_heads 2, got 3");
  expect_refused([](auto& p) { p.n_queries = 0; }, "n_queries must be >= 1, got 0");
  expect_refused([](auto& p) { p.window = -1; }, "window must be >= 0, got -1");
  expect_refused([](auto& p) { p.batch = -1; }, "batch must be >= 0, got -1");
  expect_refused([](auto& p) { p.values.shape.n_heads = 1; },
                 "values.n_heads must be keys' 2, got 1");
  expect_refused([](auto& p) { p.values.shape.block_size = 8; },
                 "values.block_size must be keys' 16, got 8");
  expect_refused([](auto& p) { p.keys.shape.head_dim = 0; }, "head_dim must be >= 1, got 0");
  expect_refused([](auto& p) { p.queries = nullptr; }, "queries must not be null");
  expect_refused([](auto& p) { p.mask_kind = MaskKind::kFp32; }, "mask must not be null");
  std::vector<PageRef> pages(6, {nullptr, Format::kFp16});
  expect_refused([&](auto& p) { p.keys.pages = pages.data(); }, "must not be null");
  std::byte some[1];
  pages.assign(6, {some, Format::kInt1});
  expect_refused([&](auto& p) { p.keys.pages = pages.data(); },
                 "format must be one that a page can have");
}

TEST(PagedAttentionFarPages, block_65536_at_a_stride_of_32768_is_read_where_it_lies) {
  // 2 GiB of addresses, of which one page is touched: its byte offset needs 32 bits without a sign.
  constexpr std::int64_t kStride = 32768;
  constexpr std::int64_t kBlock = 65536;
  const formats::PageLayout layout{Format::kFp16, {8, 16, 128}};
  ASSERT_EQ(layout.page_bytes(), kStride);
  const std::size_t size = static_cast<std::size_t>((kBlock + 1) * kStride);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* slab = static_cast<std::byte*>(memory);
  std::vector<PageRef> pages;
  for (std::int64_t i = 0; i <= kBlock; ++i) pages.push_back({slab + i * kStride, Format::kFp16});

  PagedData data(
      {.lengths = {16}, .n_q_heads = 8, .n_kv_heads = 8, .key_dim = 128, .value_dim = 128});
  PagedAttentionParams params = data.params();
  const std::vector<std::byte> near(params.keys.pages[0].data, params.keys.pages[0].data + kStride);
  std::ranges::copy(near, slab + kBlock * kStride);
  const PageRef near_page = {near.data(), Format::kFp16};
  const std::int32_t zero[] = {0};
  const std::int32_t far[] = {kBlock};
  for (const PagedAttentionKernel& kernel : paged_attention_kernels()) {
    params.keys.pages = params.values.pages = &near_page;
    params.indices = zero;
    const std::vector<float> expected = data.run(kernel, params);
    params.keys.pages = params.values.pages = pages.data();
    params.keys.n_pages = params.values.n_pages = kBlock + 1;
    params.indices = far;
    validate(params);
    EXPECT_EQ(data.run(kernel, params), expected) << kernel.target;
  }
  munmap(memory, size);
}

}  // namespace
}  // namespace kvpool::kernels
