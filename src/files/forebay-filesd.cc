// forebay-filesd: copies files of slow storage to a local disk for the programs of a node.
//
// Started by the first program that needs it (files/session.cc) and gone some seconds after the
// last has left.
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "files/service.h"
#include "wire/program.h"

namespace forebay::files {
namespace {

constexpr std::string_view kUsage =
    "usage: forebay-filesd --cache=DIR [--NAME=VALUE ...]\n"
    "\n"
    "Copies files of the data folders into a folder on a local disk, for the programs that\n"
    "`forebay run` starts. Those start it by themselves.\n"
    "\n"
    "  --cache=DIR            where copies lie\n"
    "  --source=DIR           a data folder; may be given several times\n"
    "  --cache_bytes=BYTES    the most that copies which are kept may take; default: four fifths\n"
    "                         of the free disk\n"
    "  --ahead_bytes=BYTES    the most that copies made ahead may take, on top; default: an\n"
    "                         eighth of the above, 16 to 256 MiB\n"
    "  --reads_in_flight=N    reads of the source at once; default 64\n"
    "  --temporary=0|1        the folder goes with the service\n"
    "  --linger=SECONDS       it stays without a client; default 5\n"
    "  --folder=DIR           of the socket; default: $XDG_RUNTIME_DIR/forebay or "
    "/tmp/forebay-UID\n";

constexpr std::string_view kName = "forebay-filesd";
constexpr unsigned kLongestEnd = 10;  // seconds

Status ParseOne(std::string_view word, wire::ProgramOptions* program, ServiceOptions* out) {
  const Result<bool> ours = wire::ParseProgramOption(word, program);
  if (!ours) return ours.error();
  if (*ours) return Status();
  const size_t equals = word.find('=');
  const std::string_view name = word.substr(2, equals - 2);
  const std::string_view value = word.substr(equals + 1);
  constexpr uint64_t kMostBytes = uint64_t{1} << 62;
  constexpr uint64_t kMostSeconds = 7 * 24 * 3600;
  uint64_t number = 0;
  if (name == "cache") {
    out->cache = value;
    return Status();
  }
  if (name == "source") {
    out->sources.emplace_back(value);
    return Status();
  }
  if (name == "cache_bytes") return wire::ParseNumber(name, value, kMostBytes, &out->cache_bytes);
  if (name == "ahead_bytes") return wire::ParseNumber(name, value, kMostBytes, &out->ahead_bytes);
  if (name == "reads_in_flight") {
    return wire::ParseNumber(name, value, 1 << 16, &out->reads_in_flight);
  }
  if (name == "slots") return wire::ParseNumber(name, value, 1 << 28, &out->slots);
  if (name == "partial_bytes") {
    return wire::ParseNumber(name, value, kMostBytes, &out->partial_bytes);
  }
  if (name == "temporary") {
    FOREBAY_RETURN_IF_ERROR(wire::ParseNumber(name, value, 1, &number));
    out->temporary = number != 0;
    return Status();
  }
  if (name == "young_ms") {
    FOREBAY_RETURN_IF_ERROR(wire::ParseNumber(name, value, kMostSeconds * 1000, &number));
    out->young = static_cast<Nanos>(number) * kMilli;
    return Status();
  }
  if (name == "linger") {
    FOREBAY_RETURN_IF_ERROR(wire::ParseNumber(name, value, kMostSeconds, &number));
    out->linger = static_cast<Nanos>(number) * kSecond;
    return Status();
  }
  return Status(Code::kInvalidArgument, StrCat("'", word, "' is no option of ", kName));
}

int Run(int argc, char** argv) {
  wire::ProgramOptions program;
  program.name = kName;
  ServiceOptions options;
  Status parsed;
  for (int i = 1; i < argc && parsed.ok(); ++i) {
    if (std::string_view(argv[i]) == "--help") {
      std::fputs(kUsage.data(), stdout);
      return 0;
    }
    parsed = ParseOne(argv[i], &program, &options);
  }
  if (parsed.ok()) parsed = options.Validate();
  const wire::ProgramPlace place = ServicePlace(program.folder, options.cache);
  options.socket = place.socket;
  options.say = [](const std::string& what) { wire::Say(kName, what); };
  return wire::RunProgram(program, place, parsed,
                          [&](const wire::ReadyReport& ready, const sigset_t& ends) {
                            Result<std::unique_ptr<Service>> service = Service::Start(options);
                            ready(service.status());
                            if (!service) return 1;
                            const OwnedFd signals(signalfd(-1, &ends, SFD_CLOEXEC));
                            std::array<pollfd, 2> fds = {pollfd{signals.get(), POLLIN, 0},
                                                         pollfd{(*service)->ended_fd(), POLLIN, 0}};
                            while (poll(fds.data(), fds.size(), -1) <= 0) {
                            }
                            // A source that hangs must not keep a service that is to end: its lock
                            // goes with it.
                            (void)alarm(kLongestEnd);
                            service->reset();
                            (void)alarm(0);
                            return 0;
                          });
}

}  // namespace
}  // namespace forebay::files

int main(int argc, char** argv) { return forebay::files::Run(argc, argv); }
