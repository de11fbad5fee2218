// Shared owners behind the Python objects: a batch keeps its engine alive, an engine its catalogs.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "catalog/catalog.h"
#include "client/client.h"
#include "client/client_batches.h"
#include "client/local_client.h"
#include "client/socket_client.h"
#include "common.h"
#include "pipeline/stored_batches.h"
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
  explicit EngineHandle(std::shared_ptr<Engine> made) : engine(std::move(made)) {
    struct Owner {
      explicit Owner(std::shared_ptr<Engine> e)
          : engine(std::move(e)), client(*engine), batches(*engine) {}
      std::shared_ptr<Engine> engine;
      LocalClient client;
      EngineBatches batches;
    };
    auto owner = std::make_shared<Owner>(engine);
    client = std::shared_ptr<Client>(owner, &owner->client);
    batches = std::shared_ptr<StoredBatches>(owner, &owner->batches);
  }
  std::shared_ptr<Engine> engine;  // shared by Python objects and batches on loan
  std::shared_ptr<Client> client;  // of that engine, which it keeps alive: what batches hold
  std::shared_ptr<StoredBatches> batches;  // likewise, for pipelines
  std::string peers_note;                  // for the log
  bool peers_failed = false;
};

// A daemon's engine.
struct SharedHandle {
  explicit SharedHandle(std::shared_ptr<SocketClient> made)
      : client(std::move(made)), batches(std::make_shared<ClientBatches>(client)) {}
  std::shared_ptr<SocketClient> client;    // shared by Python objects and batches on loan
  std::shared_ptr<ClientBatches> batches;  // shared with pipelines
};

// A forebay.Batch: samples on loan from an engine here or in another process.
nb::object MakeBatch(std::shared_ptr<Client> client, std::shared_ptr<const Catalog> catalog,
                     BatchLoan loan);

}  // namespace forebay::python
