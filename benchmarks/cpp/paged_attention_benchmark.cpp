// Decode attention over pages: one query of 32 heads over 8 kv heads of 128 dims, block size 16.
// Calls go through as many layers as make 512 MiB, so that no page is still in a cache when it is
// read again; plain_read reads the same bytes in the same order. Pages lie in huge pages where the
// system gives them. Arguments: tokens, threads. Every implementation of this machine is measured.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attended_pages.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"

namespace kvpool::kernels {
namespace {

using benchmarks::kDim;
using benchmarks::kKvHeads;
using benchmarks::kQHeads;
using formats::Format;
using formats::PageLayout;

constexpr std::int64_t kBlockSize = 16;
constexpr std::int64_t kWorkingSet = std::int64_t{512} << 20;
constexpr std::int64_t kHugePage = std::int64_t{2} << 20;

/// Memory of whole huge pages.
class HugeBuffer {
 public:
  explicit HugeBuffer(std::int64_t bytes)
      : size_(
            static_cast<std::size_t>((bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage)),
        memory_(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    madvise(memory_, size_, MADV_HUGEPAGE);
  }
  ~HugeBuffer() { munmap(memory_, size_); }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  std::byte* data() const {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_);
    return reinterpret_cast<std::byte*>((at + kHugePage - 1) / kHugePage * kHugePage);
  }

 private:
  std::size_t size_;
  void* memory_;
};

/// The keys and values of some layers, their blocks in shuffled order as in a pool that has been
/// used for a while.
class Layers {
 public:
  Layers(Format format, std::int64_t n_tokens)
      : layout_{format, {kKvHeads, kBlockSize, kDim}},
        n_pages_(static_cast<std::int32_t>((n_tokens + kBlockSize - 1) / kBlockSize)),
        n_layers_(std::max<std::int64_t>(1, kWorkingSet / (2 * n_pages_ * layout_.page_bytes()))),
        memory_(2 * n_layers_ * n_pages_ * layout_.page_bytes()),
        indptr_{0, n_pages_},
        last_page_len_(static_cast<std::int32_t>((n_tokens - 1) % kBlockSize + 1)),
        queries_(static_cast<std::size_t>(kQHeads * kDim), 0x2e66),  // 0.1
        output_(queries_.size()),
        pages_(benchmarks::fill_pages(layout_, memory_.data(), 2 * n_layers_ * n_pages_)) {
    std::ranges::shuffle(pages_, std::mt19937(1));
  }

  PagedAttentionParams params(std::int64_t layer) {
    PagedAttentionParams p = benchmarks::causal_attention(Format::kFp16, queries_, output_, 1);
    p.keys = {pages_.data() + 2 * layer * n_pages_, n_pages_, layout_.shape};
    p.values = {pages_.data() + (2 * layer + 1) * n_pages_, n_pages_, layout_.shape};
    p.indptr = indptr_;
    p.last_page_len = &last_page_len_;
    return p;
  }

  std::int64_t n_layers() const { return n_layers_; }
  std::int64_t layer_bytes() const { return 2 * n_pages_ * layout_.page_bytes(); }
  const PageRef* layer_pages(std::int64_t layer) const {
    return pages_.data() + 2 * layer * n_pages_;
  }
  std::int64_t layer_n_pages() const { return 2 * n_pages_; }
  std::int64_t page_bytes() const { return layout_.page_bytes(); }

 private:
  PageLayout layout_;
  std::int32_t n_pages_;
  std::int64_t n_layers_;
  HugeBuffer memory_;
  std::int32_t indptr_[2];
  std::int32_t last_page_len_;
  std::vector<std::uint16_t> queries_, output_;
  std::vector<PageRef> pages_;
};

std::unique_ptr<WorkerPool> workers_of(std::int64_t n_threads) {
  return n_threads > 1 ? std::make_unique<WorkerPool>(static_cast<int>(n_threads)) : nullptr;
}

void decode(benchmark::State& state, const PagedAttentionKernel& kernel, Format format) {
  Layers layers(format, state.range(0));
  const auto workers = workers_of(state.range(1));
  std::vector<std::uint64_t> scratch(
      kernel.scratch_bytes(layers.params(0), state.range(1)) / sizeof(std::uint64_t) + 1);
  std::int64_t layer = 0;
  for (auto _ : state) {
    kernel.run(layers.params(layer), reinterpret_cast<std::byte*>(scratch.data()), workers.get());
    layer = (layer + 1) % layers.n_layers();
  }
  state.SetBytesProcessed(state.iterations() * layers.layer_bytes());
}

void plain_read(benchmark::State& state, Format format) {
  Layers layers(format, state.range(0));
  const auto workers = workers_of(state.range(1));
  std::int64_t layer = 0;
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(layers.layer_n_pages()));
  for (auto _ : state) {
    const PageRef* pages = layers.layer_pages(layer);
    const auto read = [&](std::int64_t i, int) noexcept {
      const auto* words = reinterpret_cast<const std::uint64_t*>(pages[i].data);
      std::uint64_t sum[8] = {};
      for (std::int64_t w = 0; w < layers.page_bytes() / 8; w += 8) {
        for (std::int64_t j = 0; j < 8; ++j) sum[j] += words[w + j];
      }
      sums[static_cast<std::size_t>(i)] = std::accumulate(sum, sum + 8, std::uint64_t{0});
    };
    if (workers != nullptr) {
      workers->run(layers.layer_n_pages(), read);
    } else {
      for (std::int64_t i = 0; i < layers.layer_n_pages(); ++i) read(i, 0);
    }
    benchmark::DoNotOptimize(sums.data());
    benchmark::ClobberMemory();
    layer = (layer + 1) % layers.n_layers();
  }
  state.SetBytesProcessed(state.iterations() * layers.layer_bytes());
}

const int registered = [] {
  const auto add = [](const std::string& name, auto function) {
    auto* benchmark = benchmark::RegisterBenchmark(name.c_str(), function);
    benchmark->ArgNames({"tokens", "threads"})->Unit(benchmark::kMillisecond)->UseRealTime();
    for (const std::int64_t threads : {1, 2}) {
      for (const std::int64_t tokens : {512, 4096, 32768}) benchmark->Args({tokens, threads});
    }
  };
  for (const Format format : {Format::kFp16, Format::kInt8, Format::kInt4}) {
    const std::string name(formats::traits(format).name);
    add("plain_read/" + name, [=](benchmark::State& state) { plain_read(state, format); });
    for (const PagedAttentionKernel& kernel : paged_attention_kernels()) {
      if (kernel.target == "scalar") continue;
      add("decode/" + name + "/" + std::string(kernel.target),
          [=](benchmark::State& state) { decode(state, kernel, format); });
    }
  }
  return 0;
}();

}  // namespace
}  // namespace kvpool::kernels
