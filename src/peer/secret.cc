#include "peer/secret.h"

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/owned.h"
#include "base/trusted_files.h"
#include "control/etcd_store.h"

namespace forebay::peer {
namespace {

constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256Stream {
 public:
  void Add(std::span<const std::byte> data) {
    length_ += data.size();
    for (const std::byte byte : data) {
      block_[filled_++] = std::to_integer<uint8_t>(byte);
      if (filled_ == block_.size()) Compress();
    }
  }

  Digest Finish() {
    const uint64_t bits = length_ * 8;
    AddByte(0x80);
    while (filled_ != 56) AddByte(0);
    for (int shift = 56; shift >= 0; shift -= 8) AddByte(static_cast<uint8_t>(bits >> shift));
    Digest digest{};
    for (size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  void AddByte(uint8_t byte) {
    block_[filled_++] = byte;
    if (filled_ == block_.size()) Compress();
  }

  void Compress() {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 16; ++i) {
      w[i] = uint32_t{block_[4 * i]} << 24 | uint32_t{block_[4 * i + 1]} << 16 |
             uint32_t{block_[4 * i + 2]} << 8 | uint32_t{block_[4 * i + 3]};
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::array<uint32_t, 8> v = state_;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
      const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
      const uint32_t t1 = v[7] + s1 + choice + kRound[i] + w[i];
      const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
      const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      v = {t1 + s0 + majority, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (size_t i = 0; i < 8; ++i) state_[i] += v[i];
    filled_ = 0;
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string JobHash(const ClusterSpec& cluster) {
  const Digest digest = Sha256(AsBytes(cluster.job));
  return Hex(std::span(digest).first(8));
}

// Whatever the text is (ours is 64 hexadecimal digits, a user's may be longer), 32 bytes.
std::string FromText(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  const Digest digest = Sha256(AsBytes(text));
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

constexpr size_t kShortest = 32;
constexpr size_t kLongest = 4096;
constexpr Nanos kPatience = 2 * kSecond;
constexpr Nanos kEtcdLease = 7 * 24 * 3600 * kSecond;
constexpr time_t kForget = 30 * 24 * 3600;

constexpr std::string_view kRemedy =
    "; make it a file that only this user can read (chmod 600), or name another one with "
    "FOREBAY_PEER_SECRET";

// None: it is not there, or its maker has not finished it.
Result<std::string> ReadOnce(const std::string& path, bool* unfinished) {
  *unfinished = false;
  const Result<SecretText> read = ReadSecretFile(path, "the secret", kRemedy, kLongest);
  if (!read) return read.error();
  if (read->text.size() < kShortest) {
    *unfinished = true;
    return Status(Code::kInvalidArgument, StrCat("the secret ", path, " has ", read->text.size(),
                                                 " bytes, not ", kShortest, " or more", kRemedy));
  }
  // Used files stay; see Forget.
  (void)::futimens(read->file.get(), nullptr);
  return FromText(read->text);
}

Status WriteText(int fd, const std::string& path, std::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = ::write(fd, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return ErrnoStatus(errno, StrCat("writing the secret ", path));
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  if (::fsync(fd) != 0) return ErrnoStatus(errno, StrCat("writing the secret ", path));
  return Status();
}

// Makes the file unless it is there. The whole text appears at once under its name; where the file
// system has no hard links, it grows in its place and readers wait for the end of it.
Status MakeFile(const std::string& path) {
  const Digest random = RandomDigest();
  const std::string text = Hex(random) + "\n";
  const Digest unique = RandomDigest();
  const std::string temporary = StrCat(path, ".", Hex(std::span(unique).first(8)));
  constexpr int kMake = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  {
    const OwnedFd fd(::open(temporary.c_str(), kMake, 0600));
    if (!fd.valid()) return ErrnoStatus(errno, StrCat("making the secret ", path));
    const Status status = WriteText(fd.get(), path, text);
    if (!status.ok()) {
      ::unlink(temporary.c_str());
      return status;
    }
  }
  const int linked = ::link(temporary.c_str(), path.c_str());
  const int error = errno;
  ::unlink(temporary.c_str());
  if (linked == 0 || error == EEXIST) return Status();
  if (error != EPERM && error != EOPNOTSUPP && error != ENOSYS && error != EACCES) {
    return ErrnoStatus(error, StrCat("making the secret ", path));
  }
  const OwnedFd fd(::open(path.c_str(), kMake, 0600));
  if (!fd.valid()) {
    return errno == EEXIST ? Status() : ErrnoStatus(errno, StrCat("making the secret ", path));
  }
  return WriteText(fd.get(), path, text);
}

Status OwnFolder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, StrCat("making the folder ", folder,
                                     " for the job's secret (FOREBAY_PEER_SECRET names another "
                                     "file, on storage that all nodes share)"));
  }
  struct stat st = {};
  if (::lstat(folder.c_str(), &st) != 0) return ErrnoStatus(errno, folder);
  if (!S_ISDIR(st.st_mode) || st.st_uid != ::geteuid() || (st.st_mode & 022) != 0) {
    return Status(Code::kPermissionDenied,
                  StrCat(folder, " must be a folder of this user that nobody else can write to"));
  }
  return Status();
}

// Secrets of jobs that nobody has used for a month.
void Forget(const std::string& folder) {
  DIR* const list = ::opendir(folder.c_str());
  if (list == nullptr) return;
  const time_t now = ::time(nullptr);
  while (const dirent* entry = ::readdir(list)) {
    if (!std::string_view(entry->d_name).starts_with("secret-")) continue;
    struct stat st = {};
    if (::fstatat(::dirfd(list), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(st.st_mode) && now - st.st_mtime > kForget) {
      ::unlinkat(::dirfd(list), entry->d_name, 0);
    }
  }
  ::closedir(list);
}

Result<std::string> HomeFolder() {
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') return {home};
  std::vector<char> room(16 << 10);
  passwd entry = {};
  passwd* found = nullptr;
  if (::getpwuid_r(::geteuid(), &entry, room.data(), room.size(), &found) == 0 &&
      found != nullptr && found->pw_dir != nullptr && found->pw_dir[0] == '/') {
    return std::string(found->pw_dir);
  }
  return Status(Code::kNotFound,
                "no home folder for the job's secret: set FOREBAY_PEER_SECRET to a file on storage "
                "that all nodes share");
}

Result<std::string> SecretInFile(const ClusterSpec& cluster) {
  const Result<std::string> path = SecretFile(cluster);
  if (!path) return path.error();
  const Nanos until = SteadyClock().Now() + kPatience;
  bool tried = false;
  while (true) {
    bool unfinished = false;
    const Result<std::string> secret = ReadOnce(*path, &unfinished);
    if (secret) return secret;
    const bool missing = secret.error().code() == Code::kNotFound;
    if (!missing && !unfinished) return secret.error();
    if (SteadyClock().Now() >= until) return secret.error();
    if (missing && !tried) {
      tried = true;
      if (cluster.secret_file.empty()) {
        const std::string run = path->substr(0, path->rfind('/'));
        FOREBAY_RETURN_IF_ERROR(OwnFolder(run.substr(0, run.rfind('/'))));
        FOREBAY_RETURN_IF_ERROR(OwnFolder(run));
        Forget(run);
      }
      FOREBAY_RETURN_IF_ERROR(MakeFile(*path));
      continue;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

Result<std::string> SecretInEtcd(const ClusterSpec& cluster) {
  Result<std::unique_ptr<control::EtcdStore>> store =
      control::EtcdStore::Open(cluster.EtcdEndpoints(), kPatience);
  if (!store) return store.error();
  const std::string key = EtcdPrefix(cluster) + "secret";
  // Kept alive by whoever reads it; when it has just ended, a new one is made.
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Result<std::optional<control::Leadership>> there = (*store)->Leader(key);
    if (!there) return there.error();
    if (*there && (*store)->KeepAlive((*there)->lease).ok()) return FromText((*there)->name);
    const Result<control::LeaseId> lease = (*store)->GrantLease(kEtcdLease);
    if (!lease) return lease.error();
    const Digest random = RandomDigest();
    const Result<control::Leadership> won = (*store)->Campaign(key, Hex(random), *lease);
    if (!won || won->lease != *lease) (void)(*store)->Revoke(*lease);
    if (!won) return won.error();
    if (won->name.size() >= kShortest) return FromText(won->name);
  }
  return Status(Code::kUnavailable, StrCat("no secret could be made below ", key, " in etcd"));
}

}  // namespace

std::string Hex(std::span<const std::byte> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const std::byte byte : bytes) {
    out.push_back(kDigits[std::to_integer<unsigned>(byte) >> 4]);
    out.push_back(kDigits[std::to_integer<unsigned>(byte) & 15]);
  }
  return out;
}

Digest Sha256(std::span<const std::byte> data) {
  Sha256Stream stream;
  stream.Add(data);
  return stream.Finish();
}

Digest HmacSha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  std::array<std::byte, 64> block{};
  if (key.size() > block.size()) {
    const Digest digest = Sha256(key);
    std::copy(digest.begin(), digest.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  std::array<std::byte, 64> inner = block;
  std::array<std::byte, 64> outer = block;
  for (std::byte& byte : inner) byte ^= std::byte{0x36};
  for (std::byte& byte : outer) byte ^= std::byte{0x5c};
  Sha256Stream first;
  first.Add(inner);
  first.Add(data);
  const Digest digest = first.Finish();
  Sha256Stream second;
  second.Add(outer);
  second.Add(digest);
  return second.Finish();
}

bool SameDigest(const Digest& a, const Digest& b) {
  std::byte differ{0};
  for (size_t i = 0; i < a.size(); ++i) differ |= a[i] ^ b[i];
  return differ == std::byte{0};
}

Result<std::string> SecretFile(const ClusterSpec& cluster) {
  if (!cluster.secret_file.empty()) return cluster.secret_file;
  Result<std::string> home = HomeFolder();
  if (!home) return home;
  return StrCat(*home, "/.forebay/run/secret-", JobHash(cluster));
}

Result<std::string> HolderFile(const ClusterSpec& cluster) {
  Result<std::string> secret = SecretFile(cluster);
  if (!secret) return secret;
  return StrCat(*secret, ".holder-", JobHash(cluster));
}

std::string EtcdPrefix(const ClusterSpec& cluster) {
  return StrCat("forebay/peers/", JobHash(cluster), "/");
}

Result<std::string> JobSecret(const ClusterSpec& cluster) {
  if (cluster.method == ClusterSpec::Method::kEtcd && cluster.secret_file.empty()) {
    return SecretInEtcd(cluster);
  }
  return SecretInFile(cluster);
}

Digest Proof(std::string_view secret, const Challenge& challenge, bool by_initiator) {
  std::vector<std::byte> text;
  FieldWriter writer(&text);
  writer.Literal("forebay peer proof 1");
  writer(by_initiator ? uint8_t{1} : uint8_t{2}, challenge.initiator, challenge.acceptor,
         challenge.initiator_node, challenge.acceptor_node);
  return HmacSha256(AsBytes(secret), text);
}

std::string TlsKey(std::string_view secret) {
  const Digest key = HmacSha256(AsBytes(secret), AsBytes("forebay peer tls key 1"));
  return std::string(reinterpret_cast<const char*>(key.data()), key.size());
}

}  // namespace forebay::peer
