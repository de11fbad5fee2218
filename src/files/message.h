// What the file service and its clients say to each other, over a SOCK_SEQPACKET socket: one packet
// a message, one answer a request, in order. A client of one question connects, asks and closes: it
// keeps no descriptor that a program could close under it, and a fork shares nothing.
#pragma once

#include <cstdint>

namespace forebay::files {

enum class Kind : uint16_t {
  // A session: the service stays as long as this connection does.
  kHello = 1,
  // One path, that is about to be opened. The answer may take as long as the copying: kReady, the
  // copy is there; kSource, read the source yourself; kPartial, a large file that is being copied
  // (`a`: its size): open the source, and ask with kRange for what is read of it.
  kGet = 2,
  // Paths that are about to be changed, or have been; also all that lies below them, and what they
  // lead to, unless `a` is kOnlyTheName. Answered once none of their copies can be opened any more.
  kChanged = 3,
  // The coming order, of this connection's reader. kNames gives paths numbers, `a` being that of
  // the first. kOrder gives numbers (uint32_t each, after the header) from position `a` on; what
  // was said of that position and later holds no more. kAt: the reader has come to position `a`.
  kNames = 4,
  kOrder = 5,
  kAt = 6,
  // The service's metrics and knobs, as JSON.
  kStatus = 7,
  // One path; bytes from `a`, `b` of them. kReady: they and the rest of their blocks of 1 MiB are
  // in
  // CACHE/copies/NAME.part, or the copy is complete; kSource: read them yourself, and ask for
  // others.
  kRange = 8,
  // Knobs, each "name=value" where others have paths: all of them are set, or none (kBad, and the
  // text says why).
  kKnobs = 9,
  // One path of a file that is being copied, which this process is about to read past the service:
  // by a mapping, or by the descriptor `a` - 1. kReady: the copy is complete, to be read
  // instead;
  // kSource: it is not, and nothing of it is copied ahead as long as the process reads.
  kDirect = 10,
  // Of a session: the name of the job that it is from now on, where others have a path. `a` of the
  // answer is its number, see Header::job.
  kJob = 11,
  // The table of files (files/table.h), asked for once by each program that starts: the answer
  // comes with its descriptor, `a` being how many bytes of it are to be mapped.
  kTable = 12,
};

enum class Answer : uint16_t { kNone = 0, kReady = 1, kSource = 2, kPartial = 3, kBad = 4 };

// 0: the daemon's own job, of all who name none.
using JobNumber = uint16_t;

struct Header {
  static constexpr uint32_t kMagic = 0x31594246;  // "FBY1"
  uint32_t magic = kMagic;
  Kind kind = Kind::kHello;
  Answer answer = Answer::kNone;  // of a reply
  uint16_t count = 0;             // of what follows: paths, each a uint16_t length and its bytes
  JobNumber job = 0;              // for which files are read: kHello, kGet, kRange, kNames
  uint32_t bytes = 0;             // of all that follows
  uint64_t a = 0;
  uint64_t b = 0;
  // In the order of memory: clients inside of programs send it as it lies there. Which kinds and
  // answers there are is for who takes it.
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.magic);
    io.Enum(m.kind, Kind{UINT16_MAX});
    io.Enum(m.answer, Answer{UINT16_MAX});
    io(m.count, m.job, m.bytes, m.a, m.b);
  }
};
static_assert(sizeof(Header) == 32);

constexpr uint32_t kMostPacket = 128 << 10;
constexpr uint64_t kOnlyTheName = 1;  // of kChanged: a link of that name is not followed

// What `forebay run` tells the programs it starts.
constexpr const char* kCacheVariable = "FOREBAY_FILES_CACHE";    // an absolute path
constexpr const char* kSocketVariable = "FOREBAY_FILES_SOCKET";  // an absolute path
// Normal paths with : between; a folder that is reached through a link is there by both its names.
constexpr const char* kSourcesVariable = "FOREBAY_FILES_SOURCES";
constexpr const char* kJobVariable = "FOREBAY_FILES_JOB";  // a JobNumber; none: 0
// Of the mount namespace whose paths they are, as /proc/self/ns/mnt says; another one may show
// other files by the same names.
constexpr const char* kNamespaceVariable = "FOREBAY_FILES_NAMESPACE";

}  // namespace forebay::files
