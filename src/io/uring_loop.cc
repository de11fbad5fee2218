// Each op is one chain of requests, openat -> readv -> close, on a registered file slot, so that
// only the op's end comes back to the submitting thread. The head carries IOSQE_ASYNC: a kernel
// worker runs the whole chain, because an open, and a read without it, may otherwise block inside
// the submission (FUSE and NFS opens do), and page cache copies would all run on the submitting
// thread.
//
// The open does not wait for the other end of a FIFO. The read of such a descriptor may say EAGAIN;
// then the op asks what the path leads to, and reads a regular file again with an open that waits:
// a file system may say it of those, too. A registered slot cannot be asked for its type, so a
// device, and a FIFO without a writer, are known by their length only. For the same reason the
// version of a file that the op has opened is asked for by its path, when it has been read.
//
// Every request posts exactly one completion, also when its chain breaks, so an op is over when as
// many completions came as it has requests. The queues hold every request of every op: the
// completion queue cannot overflow.
#include "io/loop.h"

#ifdef FOREBAY_HAVE_URING

#include <fcntl.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/slots.h"
#include "io/scatter.h"

namespace forebay {
namespace {

constexpr unsigned kRequestsPerOp = 3;
enum Step : uint64_t { kOpen = 0, kRead = 1, kClose = 2, kStat = 3 };

Status Unimplemented(std::string_view why) {
  return Status(Code::kUnimplemented, StrCat("io_uring is not usable here: ", why));
}

// Why io_uring_setup failed, in words that name the remedy.
Status SetupStatus(int error) {
  if (error == ENOSYS) return Unimplemented("this kernel is built without it");
  if (error == EINVAL) return Unimplemented("it needs Linux 5.19 or newer");
  if (error == EPERM || error == EACCES) {
    char setting = '0';
    const OwnedFd fd(open("/proc/sys/kernel/io_uring_disabled", O_RDONLY | O_CLOEXEC));
    if (fd.valid() && read(fd.get(), &setting, 1) == 1 && setting != '0') {
      return Unimplemented(StrCat("kernel.io_uring_disabled is ", setting));
    }
    return Unimplemented("a security policy (seccomp, as containers use) forbids it");
  }
  return ErrnoStatus(error, "io_uring_setup");
}

class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (!open_) return;
    if (getpid() == creator_) {
      io_uring_queue_exit(&ring_);
    } else {
      // The ring's memory is not inherited (MADV_DONTFORK), and something else may lie there by
      // now.
      close(ring_.ring_fd);
    }
  }

  // Ready for `ops` chains at a time, or the reason why not.
  Status Open(unsigned ops) {
    io_uring_params params{};
    params.flags = IORING_SETUP_SUBMIT_ALL;
    if (const int r = io_uring_queue_init_params(ops * kRequestsPerOp, &ring_, &params); r < 0) {
      return SetupStatus(-r);
    }
    open_ = true;
    if (const int r = io_uring_ring_dontfork(&ring_); r < 0) {
      return ErrnoStatus(-r, "keep the ring's memory from forked children");
    }
    FOREBAY_RETURN_IF_ERROR(CheckOpcodes());
    if (const int r = io_uring_register_files_sparse(&ring_, ops); r < 0) {
      if (r == -EINVAL) return Unimplemented("sparse file tables need Linux 5.19 or newer");
      return ErrnoStatus(-r, StrCat("register ", ops, " file slots with io_uring"));
    }
    unsigned workers[2] = {ops, ops};
    if (const int r = io_uring_register_iowq_max_workers(&ring_, workers); r < 0) {
      if (r == -EINVAL) return Unimplemented("IORING_REGISTER_IOWQ_MAX_WORKERS is missing");
      return ErrnoStatus(-r, StrCat("allow ", ops, " io_uring workers"));
    }
    return Status();
  }

  io_uring* get() { return &ring_; }

 private:
  Status CheckOpcodes() {
    struct Free {
      void operator()(io_uring_probe* probe) const { io_uring_free_probe(probe); }
    };
    const std::unique_ptr<io_uring_probe, Free> probe(io_uring_get_probe_ring(&ring_));
    if (!probe) return Unimplemented("the kernel cannot list its operations");
    constexpr std::pair<int, std::string_view> kNeeded[] = {{IORING_OP_OPENAT, "OPENAT"},
                                                            {IORING_OP_READV, "READV"},
                                                            {IORING_OP_CLOSE, "CLOSE"},
                                                            {IORING_OP_STATX, "STATX"}};
    for (const auto& [opcode, name] : kNeeded) {
      if (!io_uring_opcode_supported(probe.get(), opcode)) {
        return Unimplemented(StrCat("the kernel lacks IORING_OP_", name));
      }
    }
    return Status();
  }

  io_uring ring_{};
  bool open_ = false;
  const pid_t creator_ = getpid();
};

class UringLoop final : public Loop {
 public:
  UringLoop(size_t capacity, OwnedFd event_fd) : slots_(capacity), event_fd_(std::move(event_fd)) {}

  ~UringLoop() override {
    if (getpid() != creator_) return;
    Completion ignored;
    while (slots_.used() > 0) {
      io_uring_submit_and_wait(ring_.get(), 1);
      TakeCompletions(std::span(&ignored, 1));
    }
  }

  Status Open() {
    FOREBAY_RETURN_IF_ERROR(ring_.Open(static_cast<unsigned>(slots_.capacity())));
    if (const int r = io_uring_register_eventfd(ring_.get(), event_fd_.get()); r < 0) {
      return ErrnoStatus(-r, "register an eventfd with io_uring");
    }
    return Status();
  }

  size_t Submit(std::span<const ReadOp> ops) override {
    const size_t taken = std::min(ops.size(), slots_.left());
    if (taken == 0) return 0;
    const Nanos now = SteadyClock().Now();
    for (const ReadOp& op : ops.first(taken)) {
      const uint32_t index = slots_.Take();
      Slot& slot = slots_[index];
      slot.op = op;
      slot.done = Completion{.tag = op.tag};
      slot.start = now;
      slot.range = RangeBytes(op);
      const bool asks = op.change_time && op.fd < 0;
      slot.phase = asks ? Slot::Phase::kBefore : Slot::Phase::kReading;
      Queue(index);
    }
    Flush();
    return taken;
  }

  size_t Reap(std::span<Completion> out) override {
    uint64_t count;
    [[maybe_unused]] const ssize_t n = read(event_fd_.get(), &count, sizeof count);
    const size_t taken = TakeCompletions(out);
    if (io_uring_sq_ready(ring_.get()) > 0) Flush();
    // The eventfd is drained, and completions that did not fit in `out` wait.
    if (io_uring_cq_ready(ring_.get()) > 0) Signal();
    return taken;
  }

  int event_fd() const override { return event_fd_.get(); }
  size_t capacity() const override { return slots_.capacity(); }
  const char* name() const override { return "io_uring"; }

 private:
  struct Slot {
    ReadOp op;
    Completion done;
    Nanos start = 0;
    unsigned waiting = 0;  // completions still to come
    int results[kStat + 1] = {};
    enum class Phase {
      kBefore,
      kReading,
      kAsking,
      kReadingAgain,
      kVersion
    } phase = Phase::kReading;
    struct statx found = {};
    uint64_t range = 0;          // bytes of the op's range
    uint64_t wanted = 0;         // of those, what the request under way asks for
    std::vector<iovec> vectors;  // where to
    std::byte beyond{};          // receives the byte after the expected end
  };

  // Prepares the requests for what is left of the slot's op.
  void Queue(uint32_t index) {
    Slot& slot = slots_[index];
    const bool opens = slot.op.fd < 0;
    slot.waiting = 0;
    std::fill(std::begin(slot.results), std::end(slot.results), 0);
    if (slot.phase == Slot::Phase::kAsking || slot.phase == Slot::Phase::kBefore) {
      const bool before = slot.phase == Slot::Phase::kBefore;
      io_uring_sqe* sqe = NextSqe(index);
      io_uring_prep_statx(sqe, AT_FDCWD, slot.op.path, before ? AT_STATX_DONT_SYNC : 0,
                          before ? STATX_CTIME : STATX_TYPE, &slot.found);
      Label(sqe, index, kStat);
      sqe->flags |= IOSQE_ASYNC;
      return;
    }
    if (slot.phase == Slot::Phase::kVersion) {
      io_uring_sqe* sqe = NextSqe(index);
      io_uring_prep_statx(
          sqe, opens ? AT_FDCWD : slot.op.fd, opens ? slot.op.path : "",
          (opens ? 0 : AT_EMPTY_PATH) | (opens || slot.op.just_opened ? AT_STATX_DONT_SYNC : 0),
          STATX_SIZE | STATX_MTIME, &slot.found);
      Label(sqe, index, kStat);
      sqe->flags |= IOSQE_ASYNC;
      return;
    }
    if (opens) {
      io_uring_sqe* sqe = NextSqe(index);
      // Without O_CLOEXEC: a registered slot is in no descriptor table, and the kernel refuses
      // both.
      const int wait = slot.phase == Slot::Phase::kReadingAgain ? 0 : O_NONBLOCK;
      io_uring_prep_openat_direct(sqe, AT_FDCWD, slot.op.path, O_RDONLY | O_NOCTTY | wait, 0,
                                  index);
      Label(sqe, index, kOpen);
      sqe->flags |= IOSQE_ASYNC | IOSQE_IO_LINK;
    }
    slot.vectors.resize(slot.op.parts.empty() ? 1 : kMostVectors);
    slot.vectors.resize(Vectors(slot.op, slot.done.bytes, waste_, slot.vectors, slot.wanted));
    if (slot.op.expect_end) slot.vectors.push_back({&slot.beyond, 1});
    io_uring_sqe* sqe = NextSqe(index);
    io_uring_prep_readv(sqe, opens ? static_cast<int>(index) : slot.op.fd, slot.vectors.data(),
                        static_cast<unsigned>(slot.vectors.size()),
                        slot.op.offset + slot.done.bytes);
    Label(sqe, index, kRead);
    // Hard link: the file is closed however the read ends, and a short read breaks a plain link.
    sqe->flags |= opens ? IOSQE_FIXED_FILE | IOSQE_IO_HARDLINK : IOSQE_ASYNC;
    if (opens) {
      sqe = NextSqe(index);
      io_uring_prep_close_direct(sqe, index);
      Label(sqe, index, kClose);
    }
  }

  io_uring_sqe* NextSqe(uint32_t index) {
    ++slots_[index].waiting;
    return io_uring_get_sqe(ring_.get());
  }

  static void Label(io_uring_sqe* sqe, uint32_t index, Step step) {
    io_uring_sqe_set_data64(sqe, (static_cast<uint64_t>(index) << 2) | step);
  }

  // What the kernel cannot take now (memory) stays queued; the signal brings the next Reap.
  void Flush() {
    const unsigned ready = io_uring_sq_ready(ring_.get());
    if (ready > 0 && io_uring_submit(ring_.get()) != static_cast<int>(ready)) Signal();
  }

  void Signal() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(event_fd_.get(), &one, sizeof one);
  }

  // Handles completions until `out` is full or none are left.
  size_t TakeCompletions(std::span<Completion> out) {
    size_t taken = 0;
    io_uring_cqe* cqe = nullptr;
    while (taken < out.size() && io_uring_peek_cqe(ring_.get(), &cqe) == 0) {
      const uint64_t label = io_uring_cqe_get_data64(cqe);
      const uint32_t index = static_cast<uint32_t>(label >> 2);
      Slot& slot = slots_[index];
      slot.results[label & 3] = cqe->res;
      io_uring_cqe_seen(ring_.get(), cqe);
      if (--slot.waiting > 0) continue;
      if (!Advance(slot)) {
        Queue(index);
        continue;
      }
      slot.done.latency_ns = SteadyClock().Now() - slot.start;
      Checksum(slot.op, slot.done);
      out[taken++] = slot.done;
      slots_.Free(index);
    }
    return taken;
  }

  // Accounts for one finished chain; true when the op is over. After a short read the rest is read
  // by another chain, which opens the file again: rare, and cheaper than keeping every file open.
  static bool Advance(Slot& slot) {
    if (slot.phase == Slot::Phase::kVersion) return TakeVersion(slot);
    if (slot.phase == Slot::Phase::kBefore) {
      const int asked = slot.results[kStat];
      if (asked == -EINTR) return false;
      const statx_timestamp& time = slot.found.stx_ctime;
      if (asked >= 0) slot.done.change_time_ns = time.tv_sec * kSecond + time.tv_nsec;
      slot.phase = Slot::Phase::kReading;  // which meets the error, too
      return false;
    }
    if (slot.phase == Slot::Phase::kAsking) {
      const int asked = slot.results[kStat];
      if (asked == -EINTR) return false;
      slot.phase = Slot::Phase::kReadingAgain;
      if (asked >= 0 && S_ISREG(slot.found.stx_mode)) return false;
      slot.done.error = asked < 0 ? -asked : ESPIPE;
      return true;
    }
    const int opened = slot.results[kOpen];
    const int got = opened < 0 ? opened : slot.results[kRead];
    if (got == -EINTR) return false;
    if (got == -EAGAIN && opened >= 0 && slot.op.fd < 0 && slot.phase == Slot::Phase::kReading) {
      slot.phase = Slot::Phase::kAsking;
      return false;
    }
    if (got < 0) {
      // A socket, or a device that is not there.
      const bool special = opened < 0 && (got == -ENXIO || got == -ENODEV);
      slot.done.error = special ? ESPIPE : -got;
      return true;
    }
    const auto bytes = static_cast<uint64_t>(got);
    slot.done.longer = bytes > slot.wanted;
    slot.done.bytes += std::min(bytes, slot.wanted);
    if (got != 0 && slot.done.bytes != slot.range) return false;
    if (!slot.op.version) return true;
    if (slot.op.fd >= 0 && slot.op.just_opened) {
      // Nobody is asked, so it does not wait: cheaper here than by another request.
      const int asked = statx(slot.op.fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC,
                              STATX_SIZE | STATX_MTIME, &slot.found);
      slot.results[kStat] = asked == 0 ? 0 : -errno;
      return TakeVersion(slot);
    }
    slot.phase = Slot::Phase::kVersion;
    return false;
  }

  static bool TakeVersion(Slot& slot) {
    const int asked = slot.results[kStat];
    if (asked == -EINTR) return false;
    const statx_timestamp& time = slot.found.stx_mtime;
    const FileVersion found{.bytes = slot.found.stx_size,
                            .modified_ns = time.tv_sec * kSecond + time.tv_nsec};
    slot.done.error = asked < 0 ? -asked : 0;
    slot.done.changed = asked >= 0 && found != *slot.op.version;
    return true;
  }

  const pid_t creator_ = getpid();
  Slots<Slot> slots_;  // the kernel holds pointers into it
  std::vector<std::byte> waste_ = std::vector<std::byte>(kWasteBytes);
  const OwnedFd event_fd_;
  Ring ring_;
};

}  // namespace

Result<std::unique_ptr<Loop>> MakeUringLoop(const LoopOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  OwnedFd event_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_fd.valid()) return ErrnoStatus(errno, "eventfd");
  auto loop = std::make_unique<UringLoop>(options.max_in_flight, std::move(event_fd));
  FOREBAY_RETURN_IF_ERROR(loop->Open());
  return std::unique_ptr<Loop>(std::move(loop));
}

Status ProbeUring() { return Ring().Open(1); }

}  // namespace forebay

#else

namespace forebay {

Status ProbeUring() {
  return Status(Code::kUnimplemented,
                "io_uring is not usable here: this build has no liburing "
                "(install liburing-dev and configure again)");
}

Result<std::unique_ptr<Loop>> MakeUringLoop(const LoopOptions&) { return ProbeUring(); }

}  // namespace forebay

#endif  // FOREBAY_HAVE_URING
