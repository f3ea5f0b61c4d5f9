#include "page_tables.h"

#include <algorithm>
#include <cstring>

#include "driver.h"
#include "memory.h"
#include "mlx_cuda.h"
#include "move_tokens.h"

namespace kvpool::mlx_ext::cuda {

using mlx::core::array;

struct PageTables::Memory {
  Memory(std::size_t n_entries, mlx::core::Stream stream)
      : capacity(n_entries), address(device_memory(n_entries * 8, stream)) {}
  ~Memory() { free_device_memory(address, capacity * 8); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::size_t capacity;
  std::uint64_t address;
};

void PageTables::Table::follow(std::span<const kernels::PageRef> pages, std::uint64_t revision,
                               mlx::core::Stream stream, NewEntries& entries) {
  // More than this many are better uploaded.
  constexpr std::size_t kMostChanges = std::size_t{2} * kMaxMoves;
  const auto changed = copy.follow(pages, revision);
  if (memory == nullptr || pages.size() > memory->capacity || changed.size() > kMostChanges) {
    std::vector<std::uint64_t> all;
    for (const kernels::PageRef& page : copy.entries()) all.push_back(table_entry(page));
    // Kernels on their way may still read the memory that there is.
    memory =
        std::make_shared<Memory>(std::max<std::size_t>(64, all.size() + all.size() / 2), stream);
    Driver::get().upload(memory->address, all.data(), all.size() * 8);
    return;
  }
  for (const std::size_t i : changed) {
    entries.tables.push_back(memory->address);
    entries.indices.push_back(static_cast<std::int32_t>(i));
    entries.values.push_back(table_entry(pages[i]));
  }
}

PageTables::Followed PageTables::follow(const cache::PageView& view, mlx::core::Stream stream,
                                        NewEntries& entries) {
  const std::lock_guard lock(lock_);
  if (stream.index != stream_) drop();
  stream_ = stream.index;
  try {
    keys_.follow(view.keys().pages, view.revision(), stream, entries);
    values_.follow(view.values().pages, view.revision(), stream, entries);
    return {{keys_.memory->address, values_.memory->address},
            std::make_shared<std::pair<std::shared_ptr<Memory>, std::shared_ptr<Memory>>>(
                keys_.memory, values_.memory)};
  } catch (...) {
    drop();
    throw;
  }
}

void PageTables::forget() noexcept {
  const std::lock_guard lock(lock_);
  drop();
}

void PageTables::drop() noexcept { keys_.memory = values_.memory = nullptr; }

std::vector<PageTables::Addresses> follow_tables(const VisibleBatch& batch,
                                                 const std::vector<array>& tokens,
                                                 mlx::core::Stream stream) {
  struct Entries {
    std::int32_t n;
    std::uint64_t tables[kMaxMoves];
    std::int32_t indices[kMaxMoves];
    std::uint64_t values[kMaxMoves];
  };
  auto& encoder = mlx::core::cu::get_command_encoder(stream);
  std::vector<PageTables::Addresses> addresses;
  std::vector<std::shared_ptr<const void>> memory;
  NewEntries changed;
  try {
    for (const VisibleRows& rows : batch) {
      auto followed = rows.tables->follow(*rows.view, stream, changed);
      addresses.push_back(followed.addresses);
      memory.push_back(std::move(followed.memory));
    }
    encoder.add_completed_handler([memory = std::move(memory)] {});
    for (std::size_t first = 0; first < changed.indices.size(); first += kMaxMoves) {
      const std::size_t n = std::min<std::size_t>(kMaxMoves, changed.indices.size() - first);
      Entries entries{};
      entries.n = static_cast<std::int32_t>(n);
      const auto at = static_cast<std::ptrdiff_t>(first);
      std::copy_n(changed.tables.begin() + at, n, entries.tables);
      std::copy_n(changed.indices.begin() + at, n, entries.indices);
      std::copy_n(changed.values.begin() + at, n, entries.values);
      // After the readers before, and before those that follow.
      for (std::size_t i = 0; i < batch.size(); ++i) encoder.set_output_array(tokens[i]);
      void* parameters[] = {&entries};
      encoder.add_kernel_node_raw(move_kernel("set_entries"), {1, 1, 1}, {kMaxMoves, 1, 1}, {}, 0,
                                  parameters);
    }
  } catch (...) {
    for (const VisibleRows& rows : batch) rows.tables->forget();
    throw;
  }
  return addresses;
}

}  // namespace kvpool::mlx_ext::cuda
