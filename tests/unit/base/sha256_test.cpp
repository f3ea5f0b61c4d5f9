#include "kvpool/base/sha256.h"

#include <gtest/gtest.h>

namespace kvpool {
namespace {

std::string hex(std::string_view bytes) { return to_hex(sha256(bytes)); }

// The examples of FIPS 180-4's test vectors.
TEST(Sha256, gives_the_standard_s_digests) {
  EXPECT_EQ(hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, tells_lengths_around_a_chunk_apart) {
  std::string last;
  for (std::size_t n = 50; n < 70; ++n) {
    const std::string digest = hex(std::string(n, '\0'));
    EXPECT_EQ(digest.size(), 64U);
    EXPECT_NE(digest, last);
    last = digest;
  }
  // 55 bytes and their padding fill a chunk; 56 need one more.
  EXPECT_EQ(hex(std::string(55, 'a')),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(hex(std::string(56, 'a')),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
}

}  // namespace
}  // namespace kvpool
