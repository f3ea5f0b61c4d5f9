#include "kvpool/storage/page_store.h"

#include <algorithm>
#include <limits>
#include <list>
#include <mutex>
#include <unordered_set>

#include "kvpool/base/adaptive_lock.h"
#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"
#include "poison.h"

namespace kvpool::storage {

namespace {

/// What a class's first slab has, about.
constexpr std::int64_t kFirstSlabBytes = std::int64_t{64} << 10;

struct SizeClass;

}  // namespace

struct PageSlab {
  PageStore::State* store = nullptr;
  SizeClass* size_class = nullptr;
  std::byte* data = nullptr;
  std::int64_t n_slots = 0;
  std::int64_t n_used = 0;
  PageSlot* free = nullptr;
  std::unique_ptr<PageSlot[]> slots;
  std::list<PageSlab>::iterator place;  // in its class's list
};

namespace {

using Slabs = std::list<PageSlab>;

struct SizeClass {
  std::int64_t bytes = 0;  // of a slot
  std::int64_t n_free = 0;
  std::int64_t n_slots = 0;
  Slabs partial;  // have a free slot; the one that was full last comes first
  Slabs full;
};

}  // namespace

/// Everything below `lock` is guarded by it. The memory is asked and given back without it.
struct PageStore::State {
  explicit State(PageStoreOptions settings) : options(std::move(settings)) {
    if (options.memory == nullptr) options.memory = system_slab_memory();
  }

  std::int64_t left() const noexcept {
    return options.byte_budget ? *options.byte_budget - stats.used_bytes
                               : std::numeric_limits<std::int64_t>::max();
  }
  SizeClass& class_of(std::int64_t bytes);
  std::int64_t slots_to_add(const SizeClass& size_class, std::int64_t missing) const noexcept;
  /// An unlinked slab of its own list; empty where the system has no memory.
  Slabs obtain(SizeClass& size_class, std::int64_t n_slots);
  void add(Slabs&& slab) noexcept;
  /// Unlinks a slab without slots in use; let go of it without the lock.
  Slabs remove(PageSlab& slab) noexcept;
  void give_back(Slabs& slabs) const noexcept;
  PageSlot* take(SizeClass& size_class, std::int64_t bytes) noexcept;
  void put_back(PageSlot* slot) noexcept;

  PageStoreOptions options;
  mutable AdaptiveLock lock;
  PageStoreStats stats;
  std::list<SizeClass> classes;
  ForkGuard fork_guard{lock};
};

void PageStoreOptions::validate() const {
  const auto refuse = [](const char* what, std::int64_t got) {
    throw InvalidArgument(std::string("[PageStore] ") + what + ", got " + std::to_string(got));
  };
  if (byte_budget && *byte_budget < 0) refuse("byte_budget must be >= 0", *byte_budget);
  if (slab_bytes < 1) refuse("slab_bytes must be >= 1", slab_bytes);
}

std::string ByteShortage::message() const {
  if (system) return "the system has no memory for " + std::to_string(needed) + " bytes";
  return std::to_string(needed) + " bytes are needed, " + std::to_string(available) +
         " are left of the byte budget of " + std::to_string(budget);
}

std::size_t SlotRef::size() const noexcept {
  return static_cast<std::size_t>(slot_->slab->size_class->bytes);
}

void SlotRef::give_back(PageSlot* slot) noexcept { slot->slab->store->put_back(slot); }

SizeClass& PageStore::State::class_of(std::int64_t bytes) {
  for (SizeClass& known : classes) {
    if (known.bytes == bytes) return known;
  }
  classes.emplace_back().bytes = bytes;
  return classes.back();
}

std::int64_t PageStore::State::slots_to_add(const SizeClass& size_class,
                                            std::int64_t missing) const noexcept {
  const std::int64_t doubled = std::max(size_class.n_slots, kFirstSlabBytes / size_class.bytes);
  const std::int64_t most = std::min(options.slab_bytes, left()) / size_class.bytes;
  return std::max<std::int64_t>(std::min(std::max(missing, doubled), most), 1);
}

Slabs PageStore::State::obtain(SizeClass& size_class, std::int64_t n_slots) {
  Slabs made(1);
  PageSlab& slab = made.front();
  slab.slots = std::make_unique<PageSlot[]>(static_cast<std::size_t>(n_slots));
  const auto size = static_cast<std::size_t>(n_slots * size_class.bytes);
  slab.data = options.memory->obtain(size);
  if (slab.data == nullptr) return {};
  poison({slab.data, size});
  slab.store = this;
  slab.size_class = &size_class;
  slab.n_slots = n_slots;
  slab.place = made.begin();
  for (std::int64_t i = n_slots - 1; i >= 0; --i) {
    PageSlot& slot = slab.slots[static_cast<std::size_t>(i)];
    slot.data = slab.data + i * size_class.bytes;
    slot.slab = &slab;
    slot.next_free = std::exchange(slab.free, &slot);
  }
  return made;
}

void PageStore::State::add(Slabs&& slab) noexcept {
  SizeClass& size_class = *slab.front().size_class;
  const std::int64_t n_slots = slab.front().n_slots;
  size_class.n_free += n_slots;
  size_class.n_slots += n_slots;
  ++stats.n_slabs;
  stats.committed_bytes += n_slots * size_class.bytes;
  size_class.partial.splice(size_class.partial.end(), slab);
}

Slabs PageStore::State::remove(PageSlab& slab) noexcept {
  SizeClass& size_class = *slab.size_class;
  size_class.n_free -= slab.n_slots;
  size_class.n_slots -= slab.n_slots;
  --stats.n_slabs;
  stats.committed_bytes -= slab.n_slots * size_class.bytes;
  Slabs removed;
  removed.splice(removed.end(), size_class.partial, slab.place);
  return removed;
}

void PageStore::State::give_back(Slabs& slabs) const noexcept {
  for (PageSlab& slab : slabs) {
    const auto size = static_cast<std::size_t>(slab.n_slots * slab.size_class->bytes);
    unpoison({slab.data, size});
    options.memory->give_back(slab.data, size);
  }
  slabs.clear();
}

PageSlot* PageStore::State::take(SizeClass& size_class, std::int64_t bytes) noexcept {
  PageSlab& slab = size_class.partial.front();
  PageSlot* const slot = slab.free;
  slab.free = slot->next_free;
  if (++slab.n_used == slab.n_slots) {
    size_class.full.splice(size_class.full.begin(), size_class.partial, slab.place);
  }
  --size_class.n_free;
  ++stats.n_used;
  stats.used_bytes += size_class.bytes;
  slot->next_free = nullptr;
  slot->seen.store(0, std::memory_order_relaxed);
  slot->references.store(1, std::memory_order_relaxed);
  unpoison({slot->data, static_cast<std::size_t>(bytes)});
  return slot;
}

void PageStore::State::put_back(PageSlot* slot) noexcept {
  Slabs emptied;
  {
    const std::lock_guard guard(lock);
    PageSlab& slab = *slot->slab;
    SizeClass& size_class = *slab.size_class;
    poison({slot->data, static_cast<std::size_t>(size_class.bytes)});
    slot->next_free = std::exchange(slab.free, slot);
    if (slab.n_used-- == slab.n_slots) {
      // The fullest of all: what is taken from it does not keep an emptier one.
      size_class.partial.splice(size_class.partial.begin(), size_class.full, slab.place);
    }
    ++size_class.n_free;
    --stats.n_used;
    stats.used_bytes -= size_class.bytes;
    if (slab.n_used == 0) emptied = remove(slab);
  }
  give_back(emptied);
}

PageStore::PageStore(PageStoreOptions options) {
  options.validate();
  state_ = std::make_unique<State>(std::move(options));
}

PageStore::~PageStore() = default;

const PageStoreOptions& PageStore::options() const noexcept { return state_->options; }

std::optional<ByteShortage> PageStore::try_take(std::int64_t bytes, std::span<SlotRef> out) {
  if (bytes < 1 || bytes > std::numeric_limits<std::int64_t>::max() - kGranule) {
    throw InvalidArgument("[PageStore::take] bytes must be >= 1, got " + std::to_string(bytes));
  }
  if (out.empty()) return std::nullopt;
  State& state = *state_;
  const std::int64_t size = class_size(bytes);
  const auto n = static_cast<std::int64_t>(out.size());
  std::int64_t needed = 0;
  if (__builtin_mul_overflow(n, size, &needed)) needed = std::numeric_limits<std::int64_t>::max();
  std::optional<ByteShortage> shortage;
  Slabs unused;
  for (bool frugal = false;;) {
    SizeClass* size_class = nullptr;
    std::int64_t n_slots = 0;
    {
      const std::lock_guard guard(state.lock);
      size_class = &state.class_of(size);
      if (!shortage && needed > state.left()) {
        shortage = ByteShortage{needed, state.left(), state.options.byte_budget.value_or(0)};
      }
      if (shortage) {
        // Slabs that were added for this call, or for another one that will add its own.
        for (auto slab = size_class->partial.begin(); slab != size_class->partial.end();) {
          const auto next = std::next(slab);
          if (slab->n_used == 0) unused.splice(unused.end(), state.remove(*slab));
          slab = next;
        }
        break;
      }
      if (size_class->n_free >= n) {
        for (SlotRef& slot : out) slot = SlotRef(state.take(*size_class, bytes));
        state.stats.peak_used_bytes = std::max(state.stats.peak_used_bytes, state.stats.used_bytes);
        return std::nullopt;
      }
      n_slots = frugal ? 1 : state.slots_to_add(*size_class, n - size_class->n_free);
    }
    Slabs fresh = state.obtain(*size_class, n_slots);
    if (!fresh.empty()) {
      const std::lock_guard guard(state.lock);
      state.add(std::move(fresh));
    } else if (!std::exchange(frugal, true) && n_slots > 1) {
      continue;
    } else {
      shortage = ByteShortage{needed, 0, state.options.byte_budget.value_or(0), true};
    }
  }
  state.give_back(unused);
  return shortage;
}

std::int64_t PageStore::available_bytes() const {
  const std::lock_guard guard(state_->lock);
  return state_->left();
}

PageStoreStats PageStore::stats() const {
  const std::lock_guard guard(state_->lock);
  return state_->stats;
}

void PageStore::check_invariants() const {
  const auto require = [](bool holds, const char* book) {
    if (!holds) throw Error(std::string("[PageStore::check_invariants] ") + book);
  };
  const std::lock_guard guard(state_->lock);
  PageStoreStats counted;
  for (const SizeClass& size_class : state_->classes) {
    std::int64_t n_free = 0;
    std::int64_t n_slots = 0;
    for (const Slabs* slabs : {&size_class.partial, &size_class.full}) {
      for (const PageSlab& slab : *slabs) {
        std::unordered_set<const PageSlot*> free;
        for (const PageSlot* slot = slab.free; slot != nullptr; slot = slot->next_free) {
          require(slot->slab == &slab, "a free slot is another slab's");
          require(free.insert(slot).second, "a slot is free twice");
        }
        const auto n = static_cast<std::int64_t>(free.size());
        require(slab.n_slots - slab.n_used == n, "free slots do not add up");
        require((n == 0) == (slabs == &size_class.full), "a slab is in the wrong list");
        require(slab.n_used > 0, "an empty slab was kept");
        for (std::int64_t i = 0; i < slab.n_slots; ++i) {
          const PageSlot& slot = slab.slots[static_cast<std::size_t>(i)];
          require(slot.data == slab.data + i * size_class.bytes, "a slot lies elsewhere");
          require(free.contains(&slot) == (slot.references.load() == 0),
                  "a slot in use is free, or the other way round");
        }
        n_free += n;
        n_slots += slab.n_slots;
        ++counted.n_slabs;
      }
    }
    require(size_class.n_free == n_free && size_class.n_slots == n_slots,
            "slots of a class do not add up");
    counted.n_used += n_slots - n_free;
    counted.used_bytes += (n_slots - n_free) * size_class.bytes;
    counted.committed_bytes += n_slots * size_class.bytes;
  }
  counted.peak_used_bytes = state_->stats.peak_used_bytes;
  require(counted == state_->stats, "counters do not add up");
  require(counted.used_bytes <= counted.peak_used_bytes, "the peak is below what is used");
  require(state_->left() >= 0, "more bytes are used than the budget has");
}

}  // namespace kvpool::storage
