#include "page_tables.h"

#include <algorithm>
#include <cstring>

#include "driver.h"
#include "kernels.h"
#include "kvpool/base/error.h"
#include "move_tokens.h"

namespace kvpool::mlx_ext::cuda {

using mlx::core::array;

struct PageTables::Memory {
  explicit Memory(std::size_t n_entries)
      : capacity(n_entries), address(Driver::get().allocate(n_entries * 8)) {
    if (address == 0) throw Error("[cuda::PageTables] the device has no memory left");
  }
  ~Memory() { Driver::get().free(address); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::size_t capacity;
  std::uint64_t address;
};

void PageTables::Table::follow(std::span<const kernels::PageRef> pages, std::uint64_t revision,
                               NewEntries& entries) {
  // More than this many are better uploaded.
  constexpr std::size_t kMostChanges = std::size_t{2} * kMaxMoves;
  const auto changed = copy.follow(pages, revision);
  if (memory == nullptr || pages.size() > memory->capacity || changed.size() > kMostChanges) {
    std::vector<std::uint64_t> all;
    for (const kernels::PageRef& page : copy.entries()) all.push_back(table_entry(page));
    // Kernels on their way may still read the memory that there is.
    memory = std::make_shared<Memory>(std::max<std::size_t>(64, all.size() + all.size() / 2));
    Driver::get().upload(memory->address, all.data(), all.size() * 8);
    return;
  }
  for (const std::size_t i : changed) {
    entries.tables.push_back(memory->address);
    entries.indices.push_back(static_cast<std::int32_t>(i));
    entries.values.push_back(table_entry(pages[i]));
  }
}

PageTables::Addresses PageTables::follow(const cache::PageView& view, NewEntries& entries) {
  const std::lock_guard lock(lock_);
  keys_.follow(view.keys().pages, view.revision(), entries);
  values_.follow(view.values().pages, view.revision(), entries);
  return {keys_.memory->address, values_.memory->address,
          std::make_shared<std::pair<std::shared_ptr<Memory>, std::shared_ptr<Memory>>>(
              keys_.memory, values_.memory)};
}

std::vector<PageTables::Addresses> follow_tables(const VisibleBatch& batch,
                                                 const std::vector<array>& tokens,
                                                 mlx::core::cu::CommandEncoder& encoder) {
  struct Entries {
    std::int32_t n;
    std::uint64_t tables[kMaxMoves];
    std::int32_t indices[kMaxMoves];
    std::uint64_t values[kMaxMoves];
  };
  std::vector<PageTables::Addresses> addresses;
  NewEntries changed;
  for (const VisibleRows& rows : batch)
    addresses.push_back(rows.tables->follow(*rows.view, changed));
  for (std::size_t first = 0; first < changed.indices.size(); first += kMaxMoves) {
    const std::size_t n = std::min<std::size_t>(kMaxMoves, changed.indices.size() - first);
    Entries entries{};
    entries.n = static_cast<std::int32_t>(n);
    std::copy_n(changed.tables.begin() + static_cast<std::ptrdiff_t>(first), n, entries.tables);
    std::copy_n(changed.indices.begin() + static_cast<std::ptrdiff_t>(first), n, entries.indices);
    std::copy_n(changed.values.begin() + static_cast<std::ptrdiff_t>(first), n, entries.values);
    // After the readers before, and before those that follow.
    for (std::size_t i = 0; i < batch.size(); ++i) encoder.set_output_array(tokens[i]);
    void* parameters[] = {&entries};
    encoder.add_kernel_node_raw(move_kernel("set_entries"), {1, 1, 1}, {kMaxMoves, 1, 1}, {}, 0,
                                parameters);
  }
  return addresses;
}

}  // namespace kvpool::mlx_ext::cuda
