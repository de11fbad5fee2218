#include <cstring>

#include "base/clock.h"
#include "base/crc32c.h"
#include "common.h"
#include "handles.h"
#include "peer/start.h"
#include "source/delay_source.h"

namespace forebay::python {
namespace {

// A batch on loan. Its memory is its own until the last view of it is gone, or release().
class Batch {
 public:
  Batch(std::shared_ptr<Port> port, std::shared_ptr<const Catalog> catalog, BatchLoan loan)
      : port_(std::move(port)), catalog_(std::move(catalog)), loan_(std::move(loan)) {
    for (size_t i = 1; i < loan_.offsets.size(); ++i) {
      contiguous_ &= loan_.offsets[i] == loan_.offsets[i - 1] + loan_.lengths[i - 1];
    }
  }
  Batch(Batch&&) = default;
  ~Batch() { Release(); }

  void Release() {
    if (port_ == nullptr) return;
    // Refused only in a forked child, whose parent still has it, and after a daemon's end.
    (void)port_->Release(loan_.lease);
    port_.reset();
  }
  bool released() const { return port_ == nullptr; }

  size_t size() const { return loan_.samples.size(); }
  const BatchLoan& loan() const { return loan_; }
  const Catalog& catalog() const { return *catalog_; }
  bool contiguous() const { return contiguous_; }

  const uint8_t* At(size_t i) const {
    if (released()) throw nb::value_error("this batch was released");
    return reinterpret_cast<const uint8_t*>(loan_.base + loan_.offsets[i]);
  }

  uint64_t bytes() const {
    uint64_t sum = 0;
    for (uint32_t n : loan_.lengths) sum += n;
    return sum;
  }

  uint32_t Checksum() const {
    uint32_t crc = 0;
    for (size_t i = 0; i < size(); ++i) {
      crc = Crc32c({reinterpret_cast<const std::byte*>(At(i)), loan_.lengths[i]}, crc);
    }
    return crc;
  }

 private:
  std::shared_ptr<Port> port_;  // shared with the engine's handle and other batches
  std::shared_ptr<const Catalog> catalog_;
  BatchLoan loan_;
  bool contiguous_ = true;
};

size_t Index(const Batch& batch, int64_t i) {
  const auto n = static_cast<int64_t>(batch.size());
  if (i < 0) i += n;
  if (i < 0 || i >= n) throw nb::index_error();
  return static_cast<size_t>(i);
}

nb::object View(nb::handle_t<Batch> self, int64_t i) {
  const Batch& batch = nb::cast<const Batch&>(self);
  const size_t at = Index(batch, i);
  return nb::cast(ByteView(batch.At(at), {batch.loan().lengths[at]}, self));
}

nb::object Data(nb::handle_t<Batch> self) {
  const Batch& batch = nb::cast<const Batch&>(self);
  const uint64_t bytes = batch.bytes();
  if (batch.contiguous()) {
    const uint8_t* first = batch.size() == 0 ? nullptr : batch.At(0);
    return nb::cast(ByteView(first, {bytes}, self));
  }
  auto* gathered = new std::vector<uint8_t>(bytes);
  nb::capsule owner(gathered,
                    [](void* p) noexcept { delete static_cast<std::vector<uint8_t>*>(p); });
  {
    WaitUnlocked unlocked;
    uint8_t* to = gathered->data();
    for (size_t i = 0; i < batch.size(); ++i) {
      const uint32_t n = batch.loan().lengths[i];
      if (n != 0) std::memcpy(to, batch.At(i), n);
      to += n;
    }
  }
  return nb::cast(ByteView(gathered->data(), {bytes}, owner));
}

nb::object Field(nb::handle_t<Batch> self, int64_t i, const std::string& name) {
  const Batch& batch = nb::cast<const Batch&>(self);
  const size_t at = Index(batch, i);
  std::string known;
  for (const FieldView& f : batch.catalog().Fields(batch.loan().samples[at])) {
    if (f.name == name) return nb::cast(ByteView(batch.At(at) + f.offset, {f.length}, self));
    known += StrCat(known.empty() ? "" : ", ", f.name);
  }
  throw nb::key_error(StrCat("sample ", batch.catalog().SampleName(batch.loan().samples[at]),
                             " has no field '", name, "'; it has: ", known)
                          .c_str());
}

TunePolicy TunerFrom(const std::string& name) {
  if (name == "prisma") return TunePolicy::kPrisma;
  if (name != "forebay") {
    Raise(Status(Code::kInvalidArgument,
                 StrCat("tuner is '", name, "'; it takes forebay or prisma")));
  }
  return TunePolicy::kForebay;
}

PosixSourceOptions::Io IoFrom(const std::string& name) {
  if (name == "threads") return PosixSourceOptions::Io::kThreads;
  if (name == "io_uring") return PosixSourceOptions::Io::kUring;
  if (name != "auto") {
    Raise(Status(Code::kInvalidArgument,
                 StrCat("io is '", name, "'; it takes auto, threads or io_uring")));
  }
  return PosixSourceOptions::Io::kAuto;
}

}  // namespace

nb::object LabelsOf(const Catalog& catalog, const std::vector<SampleId>& samples) {
  std::vector<int64_t> labels;
  for (const SampleId sample : samples) labels.push_back(catalog.label(sample));
  return Array(std::move(labels));
}

nb::object PathsOf(const Catalog& catalog, const std::vector<SampleId>& samples) {
  nb::list paths;
  for (const SampleId sample : samples) paths.append(FileText(catalog.SampleName(sample)));
  return paths;
}

nb::object MakeBatch(const std::shared_ptr<Port>& port, BatchLoan loan) {
  std::shared_ptr<const Catalog> catalog = port->Find(loan.dataset);
  if (catalog == nullptr) {
    (void)port->Release(loan.lease);
    Raise(Status(Code::kInternal, "a batch of a data set that this process did not open"));
  }
  return nb::cast(Batch(port, std::move(catalog), std::move(loan)));
}

nb::object ClusterOf(const ClusterReport& report) {
  if (report.nodes == 0) return nb::none();
  nb::dict d;
  d["node"] = report.node;
  d["nodes"] = report.nodes;
  d["coordinated"] = report.coordinated;
  d["description"] = FileText(report.description);
  d["health"] = FileText(report.health);
  nb::list peers;
  for (const PeerReport& p : report.peers) {
    nb::dict one;
    one["node"] = p.node;
    one["address"] = FileText(p.address);
    one["state"] = p.state;
    one["fault"] = FileText(p.fault);
    one["faults"] = p.faults;
    one["reads"] = p.reads;
    one["bytes"] = p.bytes;
    one["served"] = p.served;
    one["served_bytes"] = p.served_bytes;
    one["timeouts"] = p.timeouts;
    one["refused"] = p.refused;
    one["corrupt"] = p.corrupt;
    one["lost"] = p.lost;
    one["latency_ns"] = p.latency_ns;
    peers.append(one);
  }
  d["peers"] = peers;
  return d;
}

void BindEngine(nb::module_& m) {
  m.def("cluster_name", &peer::ClusterName, nb::arg("peers") = "", nb::arg("suffix") = "",
        "The cluster that an engine would be a node of which is told this, and this environment; "
        "empty: none.");
  m.def("wants_peers", &peer::WantsPeers, nb::arg("peers") = "",
        "Whether an engine that is told this, and this environment, is meant to have peers.");
  nb::class_<Batch>(m, "Batch",
                    "Samples on loan: nobody else touches this memory until the batch and all "
                    "views of it are gone.")
      .def("__len__", &Batch::size)
      .def("__getitem__", &View, nb::arg("i"), "Sample i's bytes: a read-only view, no copy.")
      .def("field", &Field, nb::arg("i"), nb::arg("name"),
           "One named field of sample i: a view, no copy.")
      .def_prop_ro("data", &Data,
                   "All samples' bytes in one piece; a view where they lie so "
                   "(layout='contiguous'), else gathered.")
      .def_prop_ro("contiguous", &Batch::contiguous)
      .def_prop_ro(
          "offsets",
          [](const Batch& b) {
            std::vector<int64_t> out(b.size() + 1);
            for (size_t i = 0; i < b.size(); ++i) out[i + 1] = out[i] + b.loan().lengths[i];
            return Array(std::move(out));
          },
          "Where each sample begins in `data`, and the end: one more than there are samples.")
      .def_prop_ro("lengths",
                   [](const Batch& b) { return Array(std::vector<uint32_t>(b.loan().lengths)); })
      .def_prop_ro(
          "indices", [](const Batch& b) { return Array(std::vector<uint32_t>(b.loan().samples)); },
          "Sample numbers, as the sampler yields them.")
      .def_prop_ro("labels", [](const Batch& b) { return LabelsOf(b.catalog(), b.loan().samples); })
      .def_prop_ro(
          "paths", [](const Batch& b) { return PathsOf(b.catalog(), b.loan().samples); },
          "Paths relative to the data set's root, made when asked for.")
      .def_prop_ro("epoch", [](const Batch& b) { return b.loan().epoch; })
      .def_prop_ro("index", [](const Batch& b) { return b.loan().index; })
      .def_prop_ro("nbytes", &Batch::bytes)
      .def_prop_ro("released", &Batch::released)
      .def(
          "checksum",
          [](const Batch& b) {
            WaitUnlocked unlocked;
            return b.Checksum();
          },
          "CRC-32C over every byte, in order.")
      .def("release", &Batch::Release,
           "Gives the memory back at once. Views made before must not be used any more.");

  nb::class_<EngineOptions>(m, "EngineOptions", "See forebay.Engine.")
      .def(
          "__init__",
          [](EngineOptions* self, uint64_t memory, size_t max_in_flight, size_t in_flight,
             const std::string& io, size_t copy_threads, size_t decode_threads, bool keep,
             bool verify, const std::string& cache_dir, uint64_t cache_bytes,
             const std::string& cache_group, uint64_t memory_tier, uint64_t read_ahead,
             const std::string& tuner, const std::string& tuner_log) {
            EngineOptions options;
            options.memory = memory;
            options.max_in_flight = max_in_flight;
            options.in_flight = in_flight;
            options.copy_threads = copy_threads;
            options.decode_threads = decode_threads;
            options.keep = keep;
            options.verify = verify;
            options.cache_folder = cache_dir;
            options.cache_bytes = cache_bytes;
            options.cache_group = cache_group;
            options.memory_tier = memory_tier;
            options.read_ahead = read_ahead;
            options.tuner_log = tuner_log;
            options.tuner = TunerFrom(tuner);
            options.io = IoFrom(io);
            new (self) EngineOptions(std::move(options));
          },
          nb::arg("memory") = 0, nb::arg("max_in_flight") = 256, nb::arg("in_flight") = 0,
          nb::arg("io") = "auto", nb::arg("copy_threads") = 2, nb::arg("decode_threads") = 0,
          nb::arg("keep") = true, nb::arg("verify") = false, nb::arg("cache_dir") = "",
          nb::arg("cache_bytes") = 0, nb::arg("cache_group") = "", nb::arg("memory_tier") = 0,
          nb::arg("read_ahead") = 0, nb::arg("tuner") = "forebay", nb::arg("tuner_log") = "");

  nb::class_<EngineHandle> bound(m, "Engine", "Budget, memory and streams; see forebay.Engine.");
  BindStreams(bound);
  bound
      .def(
          "__init__",
          [](EngineHandle* self, const EngineOptions& options, const std::string& peers) {
            EnginePtr engine = Value(Engine::Create(options));
            peer::Started started = Value(peer::StartPeers(*engine, peers));
            new (self) EngineHandle(peer::WithPeers(std::move(engine), std::move(started.peers)));
            self->peers_note = std::move(started.note);
            self->peers_failed = started.failed;
            self->peers_warning = std::move(started.warning);
          },
          nb::arg("options"), nb::arg("peers") = "off")
      .def(
          "add_dataset",
          [](const EngineHandle& e, CatalogHandle& c, const std::string& delay,
             const std::string& key) {
            // Of another engine, or for emulated storage, which is to be read.
            const std::shared_ptr<CatalogHandle::Early> held = std::exchange(c.early, nullptr);
            const bool ours = held && held->engine == e.engine && delay.empty();
            EarlySamples* early = ours ? &held->samples : nullptr;
            std::unique_ptr<Source> source;
            if (!delay.empty()) {
              source = Value(MakeDelayedSource(*c.catalog, delay));
            }
            WaitUnlocked unlocked;
            Result<DatasetId> id = e.engine->AddDataset(c.catalog, std::move(source), early, key);
            nb::gil_scoped_acquire locked;
            return Value(std::move(id));
          },
          nb::arg("catalog"), nb::arg("delay") = "", nb::arg("key") = "",
          "`delay`: settings of an emulated slow storage, such as "
          "'open_ms=1,read_ms=1,bandwidth_mb=300'. `key`: equal data sets have the same, and share "
          "their samples. For each call there is a close_dataset.")
      .def(
          "close_dataset",
          [](const EngineHandle& e, DatasetId dataset) { (void)e.engine->CloseDataset(dataset); },
          nb::arg("dataset"),
          "The caller opens no more streams over it; it is given back when the last one closes.")
      .def(
          "knows_dataset",
          [](const EngineHandle& e, const std::string& key, bool closed) {
            return e.engine->KnowsDataset(key, closed);
          },
          nb::arg("key"), nb::arg("closed") = false,
          "Whether add_dataset would find one; `closed`: also one that memory still has some of.")
      .def(
          "rename_dataset",
          [](const EngineHandle& e, const std::string& key, const std::string& to) {
            e.engine->RenameDataset(key, to);
          },
          nb::arg("key"), nb::arg("to"))
      .def("metrics",
           [](const EngineHandle& e) {
             std::map<std::string, uint64_t> out;
             for (const Registry::Sample& s : e.engine->registry().Snapshot())
               out[s.name] = s.value;
             return out;
           })
      .def("metric_help",
           [](const EngineHandle& e) {
             std::map<std::string, std::string> out;
             for (const Registry::Sample& s : e.engine->registry().Snapshot()) out[s.name] = s.help;
             return out;
           })
      .def(
          "knobs",
          [](const EngineHandle& e) {
            nb::dict out;
            for (const Knob* knob : e.engine->registry().Knobs()) {
              out[knob->name().c_str()] =
                  nb::make_tuple(knob->value(), knob->minimum(), knob->maximum(), knob->meaning());
            }
            return out;
          },
          "name to (value, minimum, maximum, meaning)")
      .def(
          "set_knob",
          [](const EngineHandle& e, const std::string& name, int64_t value) {
            Raise(e.engine->registry().SetKnob(name, value));
          },
          nb::arg("name"), nb::arg("value"))
      .def(
          "set_knobs",
          [](const EngineHandle& e, const std::map<std::string, int64_t>& knobs) {
            std::vector<KnobSetting> settings;
            for (const auto& [name, value] : knobs) settings.push_back({name, value});
            Raise(e.engine->registry().Apply(settings));
          },
          nb::arg("knobs"), "All of them, or none.")
      .def(
          "mechanisms",
          [](const EngineHandle& e) {
            nb::dict out;
            for (const Registry::MechanismInfo& info : e.engine->registry().Mechanisms()) {
              nb::list knobs;
              for (const Knob* knob : info.knobs) knobs.append(knob->name());
              nb::list metrics;
              for (const std::string& metric : info.metrics) metrics.append(metric);
              nb::dict one;
              one["meaning"] = info.mechanism->meaning();
              one["knobs"] = knobs;
              one["metrics"] = metrics;
              out[info.mechanism->name().c_str()] = one;
            }
            return out;
          },
          "name to its meaning, and the names of its knobs and metrics")
      .def_prop_ro(
          "identity",
          [](const EngineHandle& e) { return reinterpret_cast<uintptr_t>(e.engine.get()); },
          "The same for all handles of one engine, while it lives.")
      .def_prop_ro("arena_bytes", [](const EngineHandle& e) { return e.engine->arena_bytes(); })
      .def_prop_ro(
          "cache_status",
          [](const EngineHandle& e) {
            const Status status = e.engine->CacheStatus();
            return status.ok() ? std::string() : status.ToString();
          },
          "Why the cache folder takes no copies; empty while it does, or where there is none.")
      .def_prop_ro(
          "changed_files", [](const EngineHandle& e) { return FileText(e.engine->ChangedFiles()); },
          "Files that changed after they were looked at, a line each, the first few.")
      .def_prop_ro(
          "cache_warning", [](const EngineHandle& e) { return FileText(e.engine->CacheWarning()); },
          "That the cache folder hung, so that copies were given up; empty: it never did.")
      .def_prop_ro(
          "cache_note", [](const EngineHandle& e) { return FileText(e.engine->CacheNote()); },
          "What was mended when the cache folder was opened; mostly nothing.")
      .def_prop_ro(
          "peers_note", [](const EngineHandle& e) { return FileText(e.peers_note); },
          "What there was to say when the engine looked for its cluster; mostly nothing.")
      .def_prop_ro(
          "peers_off",
          [](const EngineHandle& e) {
            const ClusterReport report = e.engine->Cluster();
            return FileText(report.nodes == 0 ? report.health : "");
          },
          "Why there are no peers though they were meant to be; mostly nothing.")
      .def_prop_ro("peers_warning", [](const EngineHandle& e) { return FileText(e.peers_warning); })
      .def_prop_ro("peers_failed", [](const EngineHandle& e) { return e.peers_failed; })
      .def(
          "cluster", [](const EngineHandle& e) { return ClusterOf(e.engine->Cluster()); },
          "What this node knows of its cluster; None without peers.")
      .def_prop_ro("in_flight_limit",
                   [](const EngineHandle& e) { return e.engine->in_flight_limit(); });
}

}  // namespace forebay::python
