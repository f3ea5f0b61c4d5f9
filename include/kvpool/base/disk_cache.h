#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace kvpool {

/// Bytes that are costly to make, kept in the files of a folder from one process to the next.
///
/// A file is named after the SHA-256 of its key and begins with a SHA-256 over that and the bytes.
/// It appears whole or not at all: written under another name, then renamed. Any number of threads
/// and processes may use a folder.
class DiskCache {
 public:
  /// An empty path: nothing is kept. The folder is made when something is.
  explicit DiskCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// The value of the environment's `variable`, which may be empty; without it
  /// `kvpool/NAME` in the user's cache folder (XDG_CACHE_HOME, or else .cache in HOME).
  static std::filesystem::path folder_for(const char* variable, std::string_view name);

  /// What is kept under `key`, or else what `make` returns, which is kept from then on. A file
  /// that is damaged, is for another key, or that another user wrote or may write is as good as
  /// none and is replaced; where the folder cannot be written nothing is kept. Throws what `make`
  /// throws, nothing else but bad_alloc.
  std::string get(std::string_view key, const std::function<std::string()>& make) const;

  const std::filesystem::path& folder() const noexcept { return folder_; }

 private:
  std::filesystem::path folder_;
};

}  // namespace kvpool
