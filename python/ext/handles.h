// Shared owners behind the Python objects: a batch keeps its engine alive, an engine its catalogs.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "catalog/catalog.h"
#include "common.h"
#include "port/failover_port.h"
#include "port/local_port.h"
#include "port/port.h"
#include "port/rank_looks.h"
#include "port/socket_port.h"
#include "stage/early_samples.h"
#include "stage/engine.h"

namespace forebay::python {

struct CatalogHandle {
  std::shared_ptr<const Catalog> catalog;  // shared by Python objects and engines
  // Samples that its scan has read, for the engine that takes them over with the data set.
  struct Early {
    explicit Early(std::shared_ptr<Engine> e) : engine(std::move(e)), samples(*engine) {}
    std::shared_ptr<Engine> engine;  // outlives the samples
    EarlySamples samples;
  };
  std::shared_ptr<Early> early = nullptr;  // null: none
};

// None without peers.
nb::object ClusterOf(const ClusterReport& report);

// One epoch as a dict.
nb::dict StatsOf(const EpochStats& epoch);
// By its place in kStallCauseNames; raises IndexError.
StallCause CauseAt(size_t place);

// Of a batch's samples.
nb::object LabelsOf(const Catalog& catalog, const std::vector<SampleId>& samples);
nb::object PathsOf(const Catalog& catalog, const std::vector<SampleId>& samples);

// Calls `take(slice)` until it has something, or `wait_s` seconds have passed (None). The GIL is
// free while it waits, and Ctrl-C is seen. A batch is what `batch()` makes; ends are strings. What
// was taken is put into `held.item` (unless that is None) before any signal handler can run: one
// that raises as soon as this returns loses nothing.
template <typename TakeFor, typename MakeBatch>
nb::object TakeInSlices(double wait_s, nb::handle held, TakeFor take, MakeBatch batch) {
  constexpr Nanos kCheckSignals = 50 * kMilli;
  const auto keep = [&](nb::object taken) {
    if (!held.is_none()) held.attr("item") = taken;
    return taken;
  };
  auto left = static_cast<Nanos>(wait_s * kSecond);
  while (true) {
    const Nanos slice = std::min(left, kCheckSignals);
    Result<TakeKind> taken = [&] {
      WaitUnlocked unlocked;
      return take(slice);
    }();
    switch (Value(std::move(taken))) {
      case TakeKind::kBatch:
        return keep(nb::cast(batch()));
      case TakeKind::kEndOfEpoch:
        return keep(nb::cast("end of epoch"));
      case TakeKind::kEndOfStream:
        return keep(nb::cast("end of stream"));
      case TakeKind::kPending:
        break;
    }
    if (SignalRaised()) throw nb::python_error();
    left -= slice;
    if (left <= 0) return nb::none();
  }
}

struct EngineHandle {
  explicit EngineHandle(std::shared_ptr<Engine> made)
      : engine(std::move(made)), port(MakeLocalPort(engine)) {}
  std::shared_ptr<Engine> engine;  // shared by Python objects and batches on loan
  std::shared_ptr<Port>
      port;                // of that engine, which it keeps alive: what batches and pipelines hold
  std::string peers_note;  // for the log
  bool peers_failed = false;
  std::string peers_warning;  // for the log, though there are peers
};

// A connection to a daemon.
struct SharedHandle {
  explicit SharedHandle(std::shared_ptr<SocketPort> made) : port(std::move(made)) {}
  std::shared_ptr<SocketPort> port;  // shared by Python objects, and by the port that it is of
};

// One opening's way to the other ranks of its job.
struct LooksHandle {
  std::shared_ptr<RankLooks> looks;
};

// What a port has to say, from the thread that finds out to the one that logs it: Python code does
// not run in threads of C++.
class Changes {
 public:
  struct Change {
    bool alone = false;
    std::string what;
  };
  void Add(Change change);
  bool any() const { return count_.load(std::memory_order_relaxed) != 0; }
  // Of the oldest one, which stays until it is dropped.
  bool First(Change* out) const;
  void DropFirst();
  // Until there is something to say; false: there never will be.
  bool Wait();
  void Close();

 private:
  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::deque<Change> changes_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<size_t> count_{0};  // of changes_, for a look without the lock
};

// The node's daemon, or an engine of this process. Batches on loan keep the port, but do not have
// it look for a daemon.
struct PortHandle {
  PortHandle(std::shared_ptr<FailoverPort> made, std::shared_ptr<Changes> said);
  ~PortHandle();
  PortHandle(const PortHandle&) = delete;
  PortHandle& operator=(const PortHandle&) = delete;

  std::shared_ptr<FailoverPort> port;  // shared by Python objects, pipelines and batches on loan
  std::shared_ptr<Changes> changes;    // shared with the port and who waits for them
};

// The port behind an Engine or a Port of Python.
std::shared_ptr<Port> PortOf(nb::handle engine);

// An engine's streams, the same for every kind of port. `Handle` has a `port`.
template <typename Handle>
void BindStreams(nb::class_<Handle>& c);

// A forebay.Batch: samples on loan from an engine here or in another process.
nb::object MakeBatch(const std::shared_ptr<Port>& port, BatchLoan loan);

}  // namespace forebay::python
