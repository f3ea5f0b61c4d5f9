#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kvpool/cache/table_copy.h"
#include "kvpool/mlx_ext/gather_pages.h"

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
/// what is there is kept, and what has changed since is written by a kernel.
///
/// Entries are written in the order of one stream: a reader on another one gets tables of its own,
/// uploaded whole, and those before it keep theirs. Thread-safe.
class PageTables {
 public:
  struct Addresses {
    std::uint64_t keys = 0;
    std::uint64_t values = 0;
  };
  struct Followed {
    Addresses addresses;
    /// To be kept until the kernels that read and write them have run.
    std::shared_ptr<const void> memory;
  };

  /// Where the tables of this view are, for kernels of this stream, once `entries` have been
  /// written. Throws Error where the device has no memory left; then nothing counts as written.
  Followed follow(const cache::PageView& view, mlx::core::Stream stream, NewEntries& entries);
  /// Entries that follow() gave were not written, or may not have been.
  void forget() noexcept;

 private:
  struct Memory;
  struct Table {
    std::shared_ptr<Memory> memory;
    cache::TableCopy copy;

    void follow(std::span<const kernels::PageRef> pages, std::uint64_t revision,
                mlx::core::Stream stream, NewEntries& entries);
  };

  void drop() noexcept;

  std::mutex lock_;
  int stream_ = -1;  // of the tables
  Table keys_;
  Table values_;
};

/// The tables of a batch, with the kernels that bring them up to date added to the stream, which
/// keeps them until all that it has got by its next commit has run.
std::vector<PageTables::Addresses> follow_tables(const VisibleBatch& batch,
                                                 const std::vector<mlx::core::array>& tokens,
                                                 mlx::core::Stream stream);

}  // namespace kvpool::mlx_ext::cuda
