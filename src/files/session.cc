#include "files/session.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "files/packet.h"
#include "files/service.h"
#include "wire/socket.h"

namespace forebay::files {

Result<std::unique_ptr<Session>> Session::Connect(const std::string& path, Nanos timeout,
                                                  JobNumber job) {
  const Result<sockaddr_un> address = wire::SocketAddress(path);
  if (!address) return address.error();
  OwnedFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "making a socket");
  const timeval wait{.tv_sec = std::max<Nanos>(timeout / kSecond, 1), .tv_usec = 0};
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return Status(Code::kUnavailable,
                  ErrnoStatus(errno, StrCat("connecting to the file service at ", path)).message());
  }
  const Result<pid_t> peer = wire::CheckPeer(fd.get());
  if (!peer) return peer.error();
  return std::unique_ptr<Session>(new Session(std::move(fd), path, timeout, job));
}

Result<std::unique_ptr<Session>> Session::Start(const SessionOptions& options) {
  const wire::ProgramPlace place = ServicePlace(options.folder, options.cache);
  wire::StartOptions start;
  start.program = options.program;
  start.name = "forebayd";
  start.settings = options.settings;
  start.settings.push_back(StrCat("files=", options.cache));
  start.timeout = options.timeout;
  std::unique_ptr<Session> session;
  const auto attach = [&](Nanos timeout) -> Status {
    Result<std::unique_ptr<Session>> made = Connect(place.socket, timeout);
    if (!made) return made.error();
    FOREBAY_RETURN_IF_ERROR((*made)->Hello(options.sources));
    if (!options.job.empty()) FOREBAY_RETURN_IF_ERROR((*made)->Join(options.job));
    session = *std::move(made);
    return Status();
  };
  FOREBAY_RETURN_IF_ERROR(wire::AttachOrStart(place, start, attach));
  return session;
}

Result<std::string> Session::Ask(std::span<const std::byte> packet, Header* header) {
  const MutexLock lock(mutex_);
  const Nanos deadline = SteadyClock().Now() + timeout_;
  if (send(fd_.get(), packet.data(), packet.size(), MSG_NOSIGNAL) < 0) {
    return Status(Code::kUnavailable, ErrnoStatus(errno, "asking the file service").message());
  }
  std::vector<std::byte> reply(kMostPacket);
  while (true) {
    const Nanos left = deadline - SteadyClock().Now();
    if (left <= 0) {
      // A late answer would be taken for the next question's.
      (void)shutdown(fd_.get(), SHUT_RDWR);
      return Status(Code::kUnavailable, "the file service does not answer");
    }
    pollfd ready = {fd_.get(), POLLIN, 0};
    if (poll(&ready, 1, static_cast<int>(std::min(left, kSecond) / kMilli) + 1) <= 0) continue;
    const ssize_t n = recv(fd_.get(), reply.data(), reply.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) return Status(Code::kUnavailable, "the file service has gone");
    const auto text = ParseAnswer({reply.data(), static_cast<size_t>(n)}, header);
    if (!text) return text.error();
    if (header->answer == Answer::kBad) {
      return Status(Code::kInvalidArgument,
                    text->empty() ? "the file service does not take this" : std::string(*text));
    }
    return std::string(*text);
  }
}

Status Session::Tell(std::span<const std::byte> packet) {
  Header header;
  return Ask(packet, &header).status();
}

Status Session::Hello(std::span<const std::string> sources) {
  const std::vector<std::string_view> views(sources.begin(), sources.end());
  Header header;
  Result<std::string> cache = Ask(PathsPacket(Kind::kHello, views, 0, 0, job_), &header);
  if (!cache) return cache.error();
  cache_ = *std::move(cache);
  return Status();
}

Status Session::Join(std::string_view job) {
  Header header;
  const Result<std::string> said = Ask(PathsPacket(Kind::kJob, {&job, 1}), &header);
  if (!said && said.error().code() != Code::kInvalidArgument) return said.error();
  job_ = said ? static_cast<JobNumber>(header.a) : 0;
  return Status();
}

Result<Answer> Session::Get(std::string_view path) {
  Header header;
  const Result<std::string> said = Ask(PathsPacket(Kind::kGet, {&path, 1}, 0, 0, job_), &header);
  if (!said) return said.error();
  return header.answer;
}

Status Session::Changed(std::string_view path) {
  return Tell(PathsPacket(Kind::kChanged, {&path, 1}));
}

Status Session::Names(std::span<const std::string_view> paths) {
  while (!paths.empty()) {
    const size_t count = PathsThatFit(paths);
    if (count == 0) return Status(Code::kInvalidArgument, "a path is too long");
    FOREBAY_RETURN_IF_ERROR(Tell(PathsPacket(Kind::kNames, paths.first(count), names_, 0, job_)));
    names_ += count;
    paths = paths.subspan(count);
  }
  return Status();
}

Status Session::Order(uint64_t position, std::span<const uint32_t> numbers) {
  do {
    const size_t count = std::min(numbers.size(), kMostNumbers);
    FOREBAY_RETURN_IF_ERROR(Tell(OrderPacket(position, numbers.first(count))));
    position += count;
    numbers = numbers.subspan(count);
  } while (!numbers.empty());
  return Status();
}

Status Session::At(uint64_t position) { return Tell(PathsPacket(Kind::kAt, {}, position)); }

Status Session::SetKnobs(std::span<const std::string> settings) {
  const std::vector<std::string_view> views(settings.begin(), settings.end());
  return Tell(PathsPacket(Kind::kKnobs, views));
}

Result<std::string> Session::StatusJson() {
  Header header;
  return Ask(PathsPacket(Kind::kStatus, {}), &header);
}

}  // namespace forebay::files
