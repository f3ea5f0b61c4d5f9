// What packing, unpacking and converting a row of 128 numbers costs in each format.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "kvpool/formats/format.h"
#include "kvpool/formats/pack.h"
#include "kvpool/formats/rows.h"

namespace kvpool::formats {
namespace {

constexpr std::size_t kWidth = 128;

void encode(benchmark::State& state, Format format) {
  const std::vector<float> numbers(kWidth, 1.0f);
  std::vector<std::byte> row(row_bytes(format, kWidth));
  for (auto _ : state) {
    benchmark::DoNotOptimize(encode_row(format, numbers, row));
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(kWidth));
}

void decode(benchmark::State& state, Format format) {
  std::vector<float> numbers(kWidth, 1.0f);
  std::vector<std::byte> row(row_bytes(format, kWidth));
  for (auto _ : state) {
    decode_row(format, row, numbers);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(kWidth));
}

void pack(benchmark::State& state, Format format) {
  const std::vector<std::uint8_t> codes(kWidth, 1);
  std::vector<std::byte> row(row_bytes(format, kWidth));
  for (auto _ : state) {
    pack_row(format, codes, row);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(kWidth));
}

void unpack(benchmark::State& state, Format format) {
  std::vector<std::uint8_t> codes(kWidth);
  const std::vector<std::byte> row(row_bytes(format, kWidth));
  for (auto _ : state) {
    unpack_row(format, row, codes);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(kWidth));
}

const int registered = [] {
  for (const FormatTraits& entry : kFormats) {
    const auto add = [&](const char* what, auto function) {
      benchmark::RegisterBenchmark((std::string(what) + "/" + std::string(entry.name)).c_str(),
                                   function, entry.format);
    };
    add("encode", encode);
    add("decode", decode);
    if (entry.kind != Kind::kCode) continue;
    add("pack", pack);
    add("unpack", unpack);
  }
  return 0;
}();

}  // namespace
}  // namespace kvpool::formats
