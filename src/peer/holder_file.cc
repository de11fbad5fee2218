#include "peer/holder_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <span>
#include <thread>
#include <utility>

#include "base/host_port.h"
#include "base/owned.h"
#include "base/thread.h"
#include "base/thread_annotations.h"
#include "base/trusted_files.h"
#include "peer/secret.h"

namespace forebay::peer {
namespace {

constexpr size_t kLongestHint = 512;

Digest ProofOfHint(std::string_view secret, std::string_view said) {
  const std::string text = StrCat("forebay holder 1 ", said);
  return HmacSha256(std::as_bytes(std::span(secret)), std::as_bytes(std::span(text)));
}

// Under another name, then in its place: nobody reads half of it.
Status ReplaceFile(const std::string& path, std::string_view text) {
  const auto failed = [&](int error) {
    return ErrnoStatus(error, StrCat("telling late nodes in ", path, " who holds the list (",
                                     "FOREBAY_PEER_SECRET names a file in a folder that this user "
                                     "can write to)"));
  };
  const Digest random = RandomDigest();
  const std::string temporary = StrCat(path, ".", Hex(std::span(random).first(8)));
  {
    const OwnedFd fd(
        ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) return failed(errno);
    const ssize_t wrote = ::write(fd.get(), text.data(), text.size());
    if (wrote != static_cast<ssize_t>(text.size())) {
      const int error = wrote < 0 ? errno : ENOSPC;
      ::unlink(temporary.c_str());
      return failed(error);
    }
  }
  if (std::rename(temporary.c_str(), path.c_str()) == 0) return Status();
  const int error = errno;
  ::unlink(temporary.c_str());
  return failed(error);
}

}  // namespace

std::string HolderText(std::string_view secret, const HolderHint& hint) {
  const std::string said = StrCat(hint.node, " ", hint.at);
  return StrCat(said, " ", Hex(ProofOfHint(secret, said)), "\n");
}

std::optional<HolderHint> ParseHolderText(std::string_view secret, std::string_view text) {
  const size_t proof = text.rfind(' ');
  const size_t space = text.find(' ');
  if (proof == std::string_view::npos || proof == space) return std::nullopt;
  HolderHint hint;
  const auto [end, error] = std::from_chars(text.data(), text.data() + space, hint.node);
  if (error != std::errc() || end != text.data() + space) return std::nullopt;
  hint.at = text.substr(space + 1, proof - space - 1);
  if (HolderText(secret, hint) != text || !ParseHostPort(hint.at)) return std::nullopt;
  return hint;
}

struct HolderNote::State {
  State(std::string where, std::string key) : path(std::move(where)), secret(std::move(key)) {}
  const std::string path;
  const std::string secret;

  Mutex mutex;
  bool busy GUARDED_BY(mutex) = false;  // a thread runs
  bool asked GUARDED_BY(mutex) = false;
  std::optional<HolderHint> write GUARDED_BY(mutex);
  std::optional<HolderHint> found GUARDED_BY(mutex);
  Status error GUARDED_BY(mutex);

  void Work() {
    while (true) {
      std::optional<HolderHint> next;
      {
        MutexLock lock(mutex);
        next = std::exchange(write, std::nullopt);
        if (!next && !std::exchange(asked, false)) {
          busy = false;
          return;
        }
      }
      if (next) {
        Status status = ReplaceFile(path, HolderText(secret, *next));
        MutexLock lock(mutex);
        error = std::move(status);
        continue;
      }
      const Result<SecretText> read = ReadSecretFile(path, "the holder's file", "", kLongestHint);
      std::optional<HolderHint> hint;
      if (read) hint = ParseHolderText(secret, read->text);
      MutexLock lock(mutex);
      found = std::move(hint);
    }
  }
};

HolderNote::HolderNote(std::string path, std::string secret)
    : state_(std::make_shared<State>(std::move(path), std::move(secret))) {}

void HolderNote::Run() {
  {
    MutexLock lock(state_->mutex);
    if (state_->path.empty() || std::exchange(state_->busy, true)) return;
  }
  auto started = StartThread<std::thread>("forebay-holder", [state = state_] { state->Work(); });
  if (started) {
    started->detach();
    return;
  }
  MutexLock lock(state_->mutex);
  state_->busy = false;
  state_->error = started.error();
}

void HolderNote::Write(const HolderHint& hint) {
  {
    MutexLock lock(state_->mutex);
    state_->write = hint;
  }
  Run();
}

void HolderNote::Ask() {
  {
    MutexLock lock(state_->mutex);
    state_->asked = true;
  }
  Run();
}

std::optional<HolderHint> HolderNote::Take() {
  MutexLock lock(state_->mutex);
  return std::exchange(state_->found, std::nullopt);
}

Status HolderNote::error() const {
  MutexLock lock(state_->mutex);
  return state_->error;
}

}  // namespace forebay::peer
