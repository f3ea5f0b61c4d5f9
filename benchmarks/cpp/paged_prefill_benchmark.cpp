// Attention of a prompt's last 512 queries over all of its tokens, by kernel, page format and
// number of threads: 32 q heads, 8 kv heads, 128 dims.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attended_pages.h"
#include "kvpool/base/aligned_buffer.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"

namespace kvpool::kernels {
namespace {

using benchmarks::kDim;
using benchmarks::kKvHeads;
using benchmarks::kQHeads;
using benchmarks::normal;

constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kQueries = 512;

void prefill(benchmark::State& state, const PagedAttentionKernel& kernel, formats::Format format) {
  const std::int64_t n_tokens = state.range(0);
  WorkerPool workers(static_cast<int>(state.range(1)));
  const formats::PageLayout layout{format, {kKvHeads, kBlock, kDim}};
  const std::int64_t n_pages = n_tokens / kBlock;
  AlignedBuffer bytes(static_cast<std::size_t>(2 * n_pages * layout.page_bytes()));
  const std::vector<PageRef> pages = benchmarks::fill_pages(layout, bytes.data(), 2 * n_pages);
  const std::vector<float> queries = normal(kQHeads * kQueries * kDim);
  std::vector<float> output(queries.size());
  const std::int32_t indptr[] = {0, static_cast<std::int32_t>(n_pages)};
  const std::int32_t last_page_len[] = {kBlock};

  PagedAttentionParams p =
      benchmarks::causal_attention(formats::Format::kFp32, queries, output, kQueries);
  p.keys = {pages.data(), n_pages, layout.shape};
  p.values = {pages.data() + n_pages, n_pages, layout.shape};
  p.indptr = indptr;
  p.last_page_len = last_page_len;
  AlignedBuffer scratch(kernel.scratch_bytes(p, workers.n_threads()));
  for (auto _ : state) {
    kernel.run(p, scratch.data(), &workers);
    benchmark::DoNotOptimize(output.data());
  }
  // Query i sees n_tokens - kQueries + i + 1 tokens; each costs a product of 128 with its key and
  // one with its value.
  const double seen = static_cast<double>(kQueries) *
                      (static_cast<double>(n_tokens) - (static_cast<double>(kQueries) - 1) / 2);
  state.counters["flop/s"] =
      benchmark::Counter(4 * seen * kDim * kQHeads, benchmark::Counter::kIsIterationInvariantRate);
}

const bool registered = [] {
  for (const PagedAttentionKernel& kernel : paged_attention_kernels()) {
    if (kernel.target == "scalar" || kernel.target == "SCALAR") continue;  // minutes
    for (const formats::Format format : formats::kPageFormats) {
      benchmark::RegisterBenchmark(
          ("prefill/" + std::string(kernel.target) + "/" +
           std::string(formats::traits(format).name))
              .c_str(),
          [&kernel, format](benchmark::State& state) { prefill(state, kernel, format); })
          ->ArgNames({"tokens", "threads"})
          ->Args({512, 1})
          ->Args({4096, 1})
          ->Args({4096, 2})
          ->Unit(benchmark::kMillisecond)
          ->MeasureProcessCPUTime()
          ->UseRealTime();
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvpool::kernels
