#include "kvpool/storage/page_store.h"

#include <gmock/gmock.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kvpool/base/error.h"

namespace kvpool::storage {
namespace {

std::vector<SlotRef> take(PageStore& store, std::int64_t bytes, std::size_t n = 1) {
  std::vector<SlotRef> slots(n);
  EXPECT_FALSE(store.try_take(bytes, slots));
  store.check_invariants();
  return slots;
}

/// Counts what it gave out, and has only so many slabs.
class CountedMemory : public SlabMemory {
 public:
  std::byte* obtain(std::size_t size) noexcept override {
    if (n_left == 0 || size > largest) return nullptr;
    --n_left;
    out += static_cast<std::int64_t>(size);
    return system->obtain(size);
  }
  void give_back(std::byte* data, std::size_t size) noexcept override {
    ++n_left;
    out -= static_cast<std::int64_t>(size);
    system->give_back(data, size);
  }

  std::int64_t n_left = 1000;
  std::int64_t out = 0;
  std::size_t largest = ~std::size_t{0};
  std::shared_ptr<SlabMemory> system = system_slab_memory();
};

TEST(PageStore, a_slot_is_in_use_as_long_as_somebody_refers_to_it) {
  PageStore store;
  SlotRef first = take(store, 1000)[0];
  SlotRef second = first;
  EXPECT_FALSE(first.is_alone());
  first.reset();
  EXPECT_TRUE(second.is_alone());
  std::memset(second.data(), 1, 1000);
  EXPECT_EQ(store.stats().n_used, 1);
  second = SlotRef();
  EXPECT_EQ(store.stats().n_used, 0);
  EXPECT_EQ(store.stats().committed_bytes, 0);
  store.check_invariants();
}

TEST(PageStore, slabs_start_small_grow_and_go_back_when_they_are_empty) {
  const auto memory = std::make_shared<CountedMemory>();
  PageStore store({.slab_bytes = 1 << 20, .memory = memory});
  auto slots = take(store, 4096);
  EXPECT_LE(memory->out, 64 << 10);
  for (int i = 1; i < 1000; ++i) slots.push_back(take(store, 4096)[0]);
  EXPECT_GE(memory->out, 1000 * 4096);
  EXPECT_LE(memory->out, (1000 + 256) * 4096);
  EXPECT_LE(store.stats().n_slabs, 16);
  EXPECT_EQ(store.stats().committed_bytes, memory->out);
  for (const SlotRef& slot : slots) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slot.data()) % PageStore::kGranule, 0u);
  }
  slots.erase(slots.begin() + 16, slots.end());
  EXPECT_EQ(memory->out, 16 * 4096);
  slots.clear();
  EXPECT_EQ(memory->out, 0);
}

TEST(PageStore, the_budget_counts_slots_by_class_and_all_or_none_are_taken) {
  PageStore store({.byte_budget = 1000});
  const auto held = take(store, 256, 2);
  std::vector<SlotRef> more(2);
  const auto shortage = store.try_take(250, more);
  ASSERT_TRUE(shortage);
  EXPECT_EQ(shortage->message(), "512 bytes are needed, 488 are left of the byte budget of 1000");
  EXPECT_FALSE(more[0]);
  EXPECT_EQ(store.stats().used_bytes, 512);
  EXPECT_EQ(store.available_bytes(), 488);
  store.check_invariants();
  EXPECT_FALSE(store.try_take(250, std::span(more).first(1)));
}

TEST(PageStore, what_the_system_refuses_is_a_shortage_too) {
  const auto memory = std::make_shared<CountedMemory>();
  memory->n_left = 2;
  memory->largest = 100;  // one slot at a time
  PageStore store({.memory = memory});
  const auto held = take(store, 64);
  std::vector<SlotRef> more(2);
  const auto shortage = store.try_take(64, more);
  ASSERT_TRUE(shortage);
  EXPECT_TRUE(shortage->system);
  EXPECT_EQ(shortage->message(), "the system has no memory for 128 bytes");
  EXPECT_EQ(memory->out, 64);  // the slab that was of no use went back
  store.check_invariants();
}

TEST(PageStore, options_out_of_range_are_refused) {
  EXPECT_THROW(PageStore({.byte_budget = -1}), InvalidArgument);
  EXPECT_THROW(PageStore({.slab_bytes = 0}), InvalidArgument);
  PageStore store;
  SlotRef slot;
  EXPECT_THROW((void)store.try_take(0, {&slot, 1}), InvalidArgument);
}

TEST(PageStore, field_G12_a_smaller_page_is_of_its_own_class) {
  PageStore store;
  SlotRef wide = take(store, 4096)[0];
  std::memset(wide.data(), 0x7f, 4096);
  wide.reset();
  const SlotRef narrow = take(store, 1152)[0];
  EXPECT_EQ(narrow.size(), 1152u);
  EXPECT_EQ(store.stats().used_bytes, 1152);
#ifdef __SANITIZE_ADDRESS__
  EXPECT_DEATH((void)static_cast<volatile std::byte*>(narrow.data())[1152], "AddressSanitizer");
#endif
}

TEST(PageStore, field_G13_a_slot_is_counted_by_its_class_both_ways) {
  PageStore store;
  const SlotRef anchor = take(store, 128)[0];
  SlotRef slot = take(store, 100)[0];
  EXPECT_EQ(store.stats().used_bytes, 256);
  slot.reset();
  EXPECT_EQ(store.stats().used_bytes, 128);
  store.check_invariants();
}

#ifdef __SANITIZE_ADDRESS__
TEST(PageStore, a_free_slot_is_poisoned) {
  PageStore store;
  const SlotRef anchor = take(store, 4096)[0];
  SlotRef slot = take(store, 4096)[0];
  const volatile std::byte* stale = slot.data();
  slot.reset();
  EXPECT_DEATH((void)stale[7], "use-after-poison");
}
#endif

TEST(PageStore, random_sizes_keep_the_books) {
  std::mt19937 random(3);
  PageStore store({.byte_budget = 1 << 20, .slab_bytes = 1 << 16});
  std::vector<std::vector<SlotRef>> held;
  for (int i = 0; i < 2000; ++i) {
    if (held.empty() || random() % 2 == 0) {
      std::vector<SlotRef> slots(1 + random() % 5);
      const std::int64_t sizes[] = {40, 1000, 4608, 30000, 100000};
      if (!store.try_take(sizes[random() % 5], slots)) held.push_back(std::move(slots));
    } else {
      std::swap(held[random() % held.size()], held.back());
      held.pop_back();
    }
    ASSERT_NO_THROW(store.check_invariants()) << i;
  }
  held.clear();
  EXPECT_EQ(store.stats().committed_bytes, 0);
}

TEST(PageStore, threads_take_and_pass_on_slots) {
  PageStore store({.slab_bytes = 1 << 14});
  std::vector<SlotRef> shared(8);
  ASSERT_FALSE(store.try_take(512, shared));
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<SlotRef> mine(shared);
    for (int i = 0; i < 3000; ++i) {
      SlotRef& slot = mine[random() % mine.size()];
      slot.reset();
      if (store.try_take(512 + 512 * (random() % 2), {&slot, 1})) continue;
      std::memset(slot.data(), static_cast<int>(seed), 512);
      for (int k = 0; k < 512; k += 64) ASSERT_EQ(slot.data()[k], static_cast<std::byte>(seed));
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 3; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  store.check_invariants();
  shared.clear();
  EXPECT_EQ(store.stats().n_used, 0);
  EXPECT_EQ(store.stats().committed_bytes, 0);
}

}  // namespace
}  // namespace kvpool::storage
