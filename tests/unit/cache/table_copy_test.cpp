#include "kvpool/cache/table_copy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace kvpool::cache {
namespace {

using formats::Format;
using kernels::PageRef;

PageRef page(std::size_t n, Format format = Format::kFp16) {
  return {reinterpret_cast<const std::byte*>((n + 1) * 4096), format};
}

/// The device's copy: only what is written there changes it.
class Device {
 public:
  void show(const std::vector<PageRef>& pages, std::uint64_t revision) {
    const auto changed = copy_.follow(pages, revision);
    n_written_ = changed.size();
    if (written_.size() < pages.size()) written_.resize(pages.size());
    for (const std::size_t i : changed) written_[i] = pages[i];
    for (std::size_t i = 0; i < pages.size(); ++i) {
      ASSERT_EQ(written_[i].data, pages[i].data) << "entry " << i;
      ASSERT_EQ(written_[i].format, pages[i].format) << "entry " << i;
    }
  }
  std::size_t n_written() const { return n_written_; }

 private:
  TableCopy copy_;
  std::vector<PageRef> written_;
  std::size_t n_written_ = 0;
};

TEST(TableCopy, an_append_writes_the_new_entries_alone) {
  Device device;
  device.show({page(1), page(2)}, 5);
  EXPECT_EQ(device.n_written(), 2u);
  device.show({page(1), page(2)}, 5);
  EXPECT_EQ(device.n_written(), 0u);
  device.show({page(1), page(2), page(3)}, 5);
  EXPECT_EQ(device.n_written(), 1u);
  device.show({page(1)}, 5);  // an older view
  EXPECT_EQ(device.n_written(), 0u);
}

TEST(TableCopy, a_page_in_another_format_is_written_again) {
  Device device;
  device.show({page(1), page(2)}, 5);
  device.show({page(1, Format::kInt8), page(2)}, 6);
  EXPECT_EQ(device.n_written(), 1u);
}

TEST(TableCopy, entries_behind_a_shorter_view_are_not_taken_for_those_of_its_revision) {
  Device device;
  device.show({page(1), page(2), page(3)}, 5);
  device.show({page(2), page(3)}, 6);           // a window dropped the first
  device.show({page(2), page(3), page(4)}, 6);  // and an append came
  EXPECT_EQ(device.n_written(), 1u);
}

TEST(TableCopy, shows_every_view_of_tables_that_change_at_random) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Device device;
    std::vector<PageRef> table;
    std::uint64_t revision = 1;
    std::size_t next = 0;
    for (int step = 0; step < 40; ++step) {
      switch (random() % 5) {
        case 0:
          if (!table.empty()) table.erase(table.begin());
          ++revision;
          break;
        case 1:
          table.resize(table.size() - random() % (table.size() + 1));
          ++revision;
          break;
        case 2:
          if (!table.empty()) table[random() % table.size()] = page(next++, Format::kInt4);
          ++revision;
          break;
        default:
          table.push_back(page(next++));
      }
      if (random() % 3 == 0) continue;
      const std::size_t n = random() % (table.size() + 1);
      device.show({table.begin(), table.begin() + static_cast<std::ptrdiff_t>(n)}, revision);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace kvpool::cache
