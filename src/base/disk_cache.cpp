#include "kvpool/base/disk_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <system_error>

#include "kvpool/base/sha256.h"

namespace kvpool {
namespace {

std::string_view as_text(const Sha256& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

/// What a file begins with.
Sha256 seal(const Sha256& key, std::string_view bytes) {
  return sha256(std::string(as_text(key)).append(bytes));
}

class File {
 public:
  explicit File(int descriptor) noexcept : descriptor_(descriptor) {}
  ~File() {
    if (is_open()) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const noexcept { return descriptor_ >= 0; }

  /// Of a file that nobody but this user and root can have written.
  std::optional<std::string> read() const {
    struct stat status{};
    if (!is_open() || ::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode) ||
        (status.st_uid != ::geteuid() && status.st_uid != 0) ||
        (status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      return std::nullopt;
    }
    std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t n = ::read(descriptor_, bytes.data() + at, bytes.size() - at);
      if (n <= 0) return std::nullopt;
      at += static_cast<std::size_t>(n);
    }
    return bytes;
  }

  bool write(std::string_view bytes) const noexcept {
    while (!bytes.empty()) {
      const ssize_t n = ::write(descriptor_, bytes.data(), bytes.size());
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }

 private:
  int descriptor_;
};

std::optional<std::string> load(const std::filesystem::path& path, const Sha256& key) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  std::optional<std::string> bytes = file.read();
  const std::size_t n = key.size();
  if (!bytes || bytes->size() < n) return std::nullopt;
  if (as_text(seal(key, std::string_view(*bytes).substr(n))) != bytes->substr(0, n)) {
    return std::nullopt;
  }
  return bytes->erase(0, n);
}

void keep(const std::filesystem::path& path, const Sha256& key, std::string_view bytes) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  std::string other = path.string() + ".XXXXXX";
  bool whole = false;
  {
    const File file(::mkostemp(other.data(), O_CLOEXEC));  // this user's alone
    if (!file.is_open()) return;
    whole = file.write(as_text(seal(key, bytes))) && file.write(bytes);
  }
  if (!whole || ::rename(other.c_str(), path.c_str()) != 0) ::unlink(other.c_str());
}

}  // namespace

std::filesystem::path DiskCache::folder_for(const char* variable, std::string_view name) {
  // Only setenv() in another thread would be a race, and that is the program's to keep.
  // NOLINTBEGIN(concurrency-mt-unsafe)
  if (const char* folder = std::getenv(variable)) return folder;
  // An XDG folder that is relative is to be ignored.
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return std::filesystem::path(cache) / "kvpool" / name;
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return std::filesystem::path(home) / ".cache" / "kvpool" / name;
  }
  // NOLINTEND(concurrency-mt-unsafe)
  return {};
}

std::string DiskCache::get(std::string_view key, const std::function<std::string()>& make) const {
  if (folder_.empty()) return make();
  const Sha256 digest = sha256(key);
  const std::filesystem::path path = folder_ / to_hex(digest);
  if (std::optional<std::string> kept = load(path, digest)) return *std::move(kept);
  std::string made = make();
  keep(path, digest, made);
  return made;
}

}  // namespace kvpool
