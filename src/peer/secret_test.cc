#include "peer/secret.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "control/etcd_process.h"

namespace forebay::peer {
namespace {

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string Hex(const Digest& digest) {
  std::string out;
  for (const std::byte byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", std::to_integer<unsigned>(byte));
    out += two;
  }
  return out;
}

TEST(Sha256, KnownAnswers) {  // FIPS 180-4's examples, and every length around a block's end
  EXPECT_EQ(Hex(Sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(Sha256(Bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256(Bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Hex(Sha256(Bytes(std::string(1000000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(Hex(Sha256(Bytes(std::string(64, 'a')))),
            "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  EXPECT_EQ(Hex(Sha256(Bytes(std::string(55, 'a')))),
            "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(Hex(Sha256(Bytes(std::string(56, 'a')))),
            "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
}

TEST(HmacSha256, KnownAnswers) {  // RFC 4231, cases 1, 2, 3, 6 and 7
  EXPECT_EQ(Hex(HmacSha256(Bytes(std::string(20, '\x0b')), Bytes("Hi There"))),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Hex(HmacSha256(Bytes("Jefe"), Bytes("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Hex(HmacSha256(Bytes(std::string(20, '\xaa')), Bytes(std::string(50, '\xdd')))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(Hex(HmacSha256(Bytes(std::string(131, '\xaa')),
                           Bytes("Test Using Larger Than Block-Size Key - Hash Key First"))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(
      Hex(HmacSha256(Bytes(std::string(131, '\xaa')),
                     Bytes("This is a test using a larger than block-size key and a larger than "
                           "block-size data. The key needs to be hashed before being used by the "
                           "HMAC algorithm."))),
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Secret, DigestsAreCompared) {
  const Digest a = RandomDigest();
  EXPECT_TRUE(SameDigest(a, a));
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= std::byte{1};
    EXPECT_FALSE(SameDigest(a, b));
  }
  EXPECT_FALSE(SameDigest(a, RandomDigest()));
}

TEST(Secret, EveryPartOfAChallengeCounts) {
  const Challenge challenge{RandomDigest(), RandomDigest(), 1, 2};
  std::set<std::string> proofs = {Hex(Proof("s", challenge, true)),
                                  Hex(Proof("s", challenge, false)),
                                  Hex(Proof("t", challenge, true))};
  Challenge other = challenge;
  other.initiator[31] ^= std::byte{1};
  proofs.insert(Hex(Proof("s", other, true)));
  other = challenge;
  other.acceptor[31] ^= std::byte{1};
  proofs.insert(Hex(Proof("s", other, true)));
  other = challenge;
  other.initiator_node = 3;
  proofs.insert(Hex(Proof("s", other, true)));
  other = challenge;
  other.acceptor_node = 3;
  proofs.insert(Hex(Proof("s", other, true)));
  std::swap(other.initiator, other.acceptor);
  proofs.insert(Hex(Proof("s", other, true)));
  EXPECT_EQ(proofs.size(), 8u);
  EXPECT_EQ(Hex(Proof("s", challenge, true)), Hex(Proof("s", challenge, true)));
}

// The text under the MAC is the protocol, too.
TEST(Secret, GoldenProof) {
  Challenge challenge{{}, {}, 0x01020304, 5};
  challenge.initiator.fill(std::byte{'i'});
  challenge.acceptor.fill(std::byte{'a'});
  const std::string rest =
      std::string(32, 'i') + std::string(32, 'a') + std::string("\4\3\2\1\5\0\0\0", 8);
  EXPECT_EQ(Hex(Proof("s", challenge, true)),
            Hex(HmacSha256(Bytes("s"), Bytes("forebay peer proof 1\1" + rest))));
  EXPECT_EQ(Hex(Proof("s", challenge, false)),
            Hex(HmacSha256(Bytes("s"), Bytes("forebay peer proof 1\2" + rest))));
}

class SecretFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "forebay-secret-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    const char* home = std::getenv("HOME");
    home_ = home == nullptr ? "" : home;
    ::setenv("HOME", folder_.c_str(), 1);
    spec_.job = "j";
  }
  void TearDown() override {
    ::setenv("HOME", home_.c_str(), 1);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string Given(const std::string& text, mode_t mode = 0600) {
    const std::string path = folder_ + "/given";
    std::filesystem::remove(path);
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    spec_.secret_file = path;
    return path;
  }

  std::string folder_;
  std::string home_;
  ClusterSpec spec_;
};

TEST_F(SecretFileTest, TheFirstMakesIt) {
  const auto secret = JobSecret(spec_);
  ASSERT_TRUE(secret) << secret.status().message();
  EXPECT_EQ(secret->size(), 32u);
  struct stat st = {};
  ASSERT_EQ(::stat(SecretFile(spec_)->c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
  EXPECT_EQ(st.st_size, 65);
  EXPECT_EQ(*JobSecret(spec_), *secret);
  spec_.job = "k";
  EXPECT_NE(*JobSecret(spec_), *secret);
  // Nothing else is left.
  size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 2u);
}

TEST_F(SecretFileTest, ManyFirstOnesAgree) {
  for (int round = 0; round < 20; ++round) {
    spec_.job = std::to_string(round);
    std::vector<std::string> secrets(8);
    {
      std::vector<std::jthread> threads;
      for (std::string& secret : secrets) {
        threads.emplace_back([this, &secret] {
          const auto made = JobSecret(spec_);
          secret = made ? *made : made.status().message();
        });
      }
    }
    EXPECT_EQ(secrets.front().size(), 32u) << secrets.front();
    EXPECT_EQ(std::set<std::string>(secrets.begin(), secrets.end()).size(), 1u);
  }
}

TEST_F(SecretFileTest, OnlyOursAndOnlyForUs) {
  const std::string text(40, 's');
  Given(text);
  ASSERT_TRUE(JobSecret(spec_)) << JobSecret(spec_).status().message();
  for (const mode_t mode : {0640, 0604, 0620, 0660}) {
    Given(text, mode);
    const auto secret = JobSecret(spec_);
    ASSERT_FALSE(secret) << mode;
    EXPECT_EQ(secret.status().code(), Code::kPermissionDenied);
    EXPECT_NE(secret.status().message().find("chmod 600"), std::string::npos);
  }
  // A link may lead to what another has prepared.
  std::filesystem::rename(Given(text), folder_ + "/other");
  std::filesystem::create_symlink(folder_ + "/other", spec_.secret_file);
  EXPECT_EQ(JobSecret(spec_).status().code(), Code::kPermissionDenied);
  spec_.secret_file = folder_;
  EXPECT_FALSE(JobSecret(spec_));
  if (::geteuid() == 0) {
    const std::string path = Given(text);
    ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
    EXPECT_EQ(JobSecret(spec_).status().code(), Code::kPermissionDenied);
  }
}

TEST_F(SecretFileTest, FolderThatOthersWriteToIsRefused) {
  ASSERT_EQ(::mkdir((folder_ + "/.forebay").c_str(), 0700), 0);
  ASSERT_EQ(::chmod((folder_ + "/.forebay").c_str(), 0777), 0);
  EXPECT_EQ(JobSecret(spec_).status().code(), Code::kPermissionDenied);
}

TEST_F(SecretFileTest, LengthHasBounds) {
  Given(std::string(32, 'x'));
  EXPECT_TRUE(JobSecret(spec_));
  Given(std::string(5000, 'x'));
  EXPECT_EQ(JobSecret(spec_).status().code(), Code::kInvalidArgument);
}

TEST_F(SecretFileTest, UnfinishedFileIsWaitedFor) {
  const std::string path = Given("");
  std::jthread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::ofstream(path) << std::string(64, 'y');
  });
  EXPECT_TRUE(JobSecret(spec_));
}

TEST_F(SecretFileTest, OldOnesAreForgotten) {
  ASSERT_TRUE(JobSecret(spec_));
  const std::string old = *SecretFile(spec_);
  const timespec times[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, old.c_str(), times, 0), 0);
  spec_.job = "another";
  ASSERT_TRUE(JobSecret(spec_));
  EXPECT_FALSE(std::filesystem::exists(old));
  EXPECT_TRUE(std::filesystem::exists(*SecretFile(spec_)));
}

TEST(EtcdSecret, TheFirstMakesIt) {
  using control::testing::EtcdProcess;
  if (!EtcdProcess::Installed()) GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
  const auto etcd = EtcdProcess::Start();
  ASSERT_NE(etcd, nullptr);
  ClusterSpec spec;
  spec.method = ClusterSpec::Method::kEtcd;
  spec.etcd = etcd->host_port();
  spec.job = "j";
  std::vector<std::string> secrets(4);
  {
    std::vector<std::jthread> threads;
    for (std::string& secret : secrets) {
      threads.emplace_back([&] {
        const auto made = JobSecret(spec);
        secret = made ? *made : made.status().message();
      });
    }
  }
  EXPECT_EQ(secrets.front().size(), 32u) << secrets.front();
  EXPECT_EQ(std::set<std::string>(secrets.begin(), secrets.end()).size(), 1u);
  spec.job = "k";
  EXPECT_NE(*JobSecret(spec), secrets.front());
  etcd->Kill();
  const auto gone = JobSecret(spec);
  ASSERT_FALSE(gone);
  EXPECT_NE(gone.status().message().find(spec.etcd), std::string::npos);
}

}  // namespace
}  // namespace forebay::peer
