#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpool/cache/table_copy.h"
#include "kvpool/mlx_ext/gather_pages.h"
#include "mlx_cuda.h"

namespace kvpool::mlx_ext::cuda {

/// An entry as kernels read it: see kernels/page_format.cuh.
inline std::uint64_t table_entry(const kernels::PageRef& page) noexcept {
  return reinterpret_cast<std::uint64_t>(page.data) | std::uint64_t(page.format) << 56;
}

/// Entries of tables that are to be written before the next kernel.
struct NewEntries {
  std::vector<std::uint64_t> tables;
  std::vector<std::int32_t> indices;
  std::vector<std::uint64_t> values;
};

/// The page tables of one layer in device memory. A step adds an entry every block_size tokens, so
/// what is there is kept, and what has changed since is written by a kernel. Thread-safe.
class PageTables {
 public:
  struct Addresses {
    std::uint64_t keys = 0;
    std::uint64_t values = 0;
    /// To be kept until the kernels that read them have run.
    std::shared_ptr<const void> memory;
  };

  /// Where the tables of this view are once `entries` have been written.
  Addresses follow(const cache::PageView& view, NewEntries& entries);

 private:
  struct Memory;
  struct Table {
    std::shared_ptr<Memory> memory;
    cache::TableCopy copy;

    void follow(std::span<const kernels::PageRef> pages, std::uint64_t revision,
                NewEntries& entries);
  };

  std::mutex lock_;
  Table keys_;
  Table values_;
};

/// The tables of a batch, with the kernels that bring them up to date added to the stream.
std::vector<PageTables::Addresses> follow_tables(const VisibleBatch& batch,
                                                 const std::vector<mlx::core::array>& tokens,
                                                 mlx::core::cu::CommandEncoder& encoder);

}  // namespace kvpool::mlx_ext::cuda
