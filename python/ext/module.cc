#include "common.h"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/crc32c.h"
#include "base/fork.h"
#include "base/system_memory.h"
#include "decode/png.h"
#include "decode/webp.h"
#include "image.h"
#include "io/loop.h"
#include "leaving.h"

namespace forebay::python {
namespace {

nb::object ExceptionType(const char* name) {
  return nb::module_::import_("forebay._errors").attr(name);
}

const char* ExceptionFor(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "ArgumentError";
    case Code::kNotFound:
      return "MissingError";
    case Code::kPermissionDenied:
      return "AccessError";
    case Code::kDataLoss:
      return "CorruptError";
    case Code::kChanged:
      return "ChangedError";
    case Code::kResourceExhausted:
      return "BudgetError";
    case Code::kUnavailable:
    case Code::kAlreadyExists:
      return "StorageError";
    case Code::kDeadlineExceeded:
      return "DeadlineError";
    case Code::kCancelled:
      return "CancelledError";
    case Code::kUnimplemented:
      return "UnsupportedError";
    case Code::kOk:
    case Code::kInternal:
      break;
  }
  return "InternalError";
}

}  // namespace

void Raise(const Status& status) {
  if (status.ok()) return;
  const nb::object type = ExceptionType(ExceptionFor(status.code()));
  PyErr_SetObject(type.ptr(), FileText(status.message()).ptr());
  throw nb::python_error();
}

nb::object FileText(const std::string& text) {
  return nb::steal(
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

namespace {

bool Finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

namespace {

constexpr auto kLongestLeave = std::chrono::seconds(1);
// For a thread that is asked to wait for the end. Somebody may wait for that thread instead.
constexpr auto kLongestWait = std::chrono::seconds(2);

struct Leaving {
  std::atomic<uint64_t> generation{ForkGeneration()};  // of the counts
  std::atomic<int> consumers{0};
  // Consumers without the GIL that have yet to look whether the end is awaited, or have seen it.
  // Whoever looks and goes on is counted out before: Leave() sets `leaver` and then reads this, a
  // consumer subtracts itself and then reads `leaver`, so one of them sees the other.
  std::atomic<int> unlocked{0};
  std::atomic<unsigned long> leaver{0};      // the thread that ends the process; 0: none
  std::atomic<uint64_t> left_generation{0};  // where `leaver` counts: not in a forked child
};

Leaving& TheLeaving() {
  static Leaving* const leaving = new Leaving;  // threads use it until the very end
  return *leaving;
}

struct Consumer {
  bool counted = false;
  uint64_t generation = 0;
  ~Consumer() {
    if (counted && generation == ForkGeneration()) --TheLeaving().consumers;
  }
};

thread_local Consumer this_consumer;

bool IsCounted() { return this_consumer.counted && this_consumer.generation == ForkGeneration(); }

// Asks all other threads that loop over loaders to wait, and waits until they do, for a moment at
// most.
void Leave() {
  Leaving& leaving = TheLeaving();
  leaving.left_generation = ForkGeneration();
  leaving.leaver = PyThread_get_thread_ident();
  if (leaving.generation != ForkGeneration()) return;
  const auto until = std::chrono::steady_clock::now() + kLongestLeave;
  WaitUnlocked unlocked;
  while (leaving.consumers > leaving.unlocked && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void CountConsumer() {
  if (IsCounted()) return;
  Leaving& leaving = TheLeaving();
  if (leaving.generation.exchange(ForkGeneration()) != ForkGeneration()) {
    leaving.consumers = 0;
    leaving.unlocked = 0;
  }
  this_consumer.counted = true;
  this_consumer.generation = ForkGeneration();
  ++leaving.consumers;
}

bool EndAwaited() {
  const Leaving& leaving = TheLeaving();
  const unsigned long leaver = leaving.leaver;
  return leaver != 0 && leaver != PyThread_get_thread_ident() &&
         leaving.left_generation == ForkGeneration();
}

WaitUnlocked::WaitUnlocked() : shuts_down_(Finalizing()), state_(PyEval_SaveThread()) {
  if (IsCounted()) ++TheLeaving().unlocked;
}

WaitUnlocked::~WaitUnlocked() {
  const bool counted = IsCounted();
  if (counted) --TheLeaving().unlocked;
  if (!shuts_down_ && EndAwaited()) {
    if (counted) ++TheLeaving().unlocked;
    const auto until = std::chrono::steady_clock::now() + kLongestWait;
    while (!Finalizing() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (counted && !Finalizing()) --TheLeaving().unlocked;
  }
  while (!shuts_down_ && Finalizing()) pause();
#ifdef __GLIBCXX__
  // The interpreter may begin to shut down at any moment until the GIL is ours.
  try {
    PyEval_RestoreThread(state_);
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
#else
  PyEval_RestoreThread(state_);
#endif
}

bool SignalRaised() { return PyErr_CheckSignals() != 0; }

}  // namespace forebay::python

NB_MODULE(_forebay, m) {
  using namespace forebay;
  // At exit a loader that the program still holds is no leak, and its users cannot mend it.
  nb::set_leak_warnings(false);
  m.doc() = "Forebay's C++ core. Use the forebay package; names here may change.";
  forebay::python::BindCache(m);
  forebay::python::BindCatalog(m);
  forebay::python::BindControl(m);
  forebay::python::BindDecode(m);
  forebay::python::BindEngine(m);
  forebay::python::BindEntryGuard(m);
  forebay::python::BindFiles(m);
  forebay::python::BindPeerLookup(m);
  forebay::python::BindPipeline(m);
  forebay::python::BindPlacement(m);
  forebay::python::BindPlan(m);
  forebay::python::BindImage(m);
  forebay::python::BindLimits(m);
  forebay::python::BindShared(m);
  forebay::python::BindSignals(m);
  forebay::python::BindSim(m);
  forebay::python::BindStreamOptions(m);
  forebay::python::BindTune(m);
  forebay::python::BindWorker(m);
  m.def(
      "crc32c",
      [](forebay::python::BytesIn bytes, uint32_t crc) {
        forebay::python::WaitUnlocked unlocked;
        return Crc32c({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, crc);
      },
      nb::arg("bytes"), nb::arg("crc") = 0, "CRC-32C of a buffer of bytes.");
  m.def("leave", &forebay::python::Leave,
        "At the interpreter's exit: asks other threads that loop over loaders to wait in next() "
        "for the end, and gives them a moment to come there.");
  m.def("default_budget", &DefaultBudget, "Bytes of memory an engine takes when none are named.");
  m.def(
      "memory_limit",
      [] {
        const MemoryLimit limit = ReadMemoryLimit();
        return std::pair<uint64_t, uint64_t>(limit.available, limit.cgroup);
      },
      "(available bytes of the node, bytes left in this process's cgroup or 0)");
  m.def(
      "features",
      [] {
        std::map<std::string, std::string> out;
        const Status uring = ProbeUring();
        out["io_uring"] = uring.ok() ? "" : uring.message();
#if FOREBAY_HAVE_JPEG
        out["libjpeg"] = "";
#endif
        if (MakePngReader() != nullptr) out["libpng"] = "";
        if (MakeWebpReader() != nullptr) out["libwebp"] = "";
        return out;
      },
      "Optional parts: name to the reason why it is missing, empty when it works.");
}
