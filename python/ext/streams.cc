// Streams of an engine: their options, and the calls that every kind of port has.
#include "common.h"
#include "handles.h"

namespace forebay::python {
namespace {

nb::object Take(const std::shared_ptr<Port>& port, StreamId stream, double wait_s,
                nb::handle held) {
  BatchLoan loan;
  return TakeInSlices(
      wait_s, held, [&](Nanos slice) { return port->Take(stream, slice, &loan); },
      [&] { return MakeBatch(port, std::move(loan)); });
}

nb::object Fetch(const std::shared_ptr<Port>& port, StreamId stream, SampleId sample,
                 double wait_s) {
  BatchLoan loan;
  const TakeKind taken = Value(Unlocked(
      [&] { return port->Fetch(stream, sample, static_cast<Nanos>(wait_s * kSecond), &loan); }));
  return taken == TakeKind::kBatch ? MakeBatch(port, std::move(loan)) : nb::none();
}

nb::list Stats(Port& port, StreamId stream) {
  nb::list out;
  for (const EpochStats& epoch : Value(Unlocked([&] { return port.Stats(stream); }))) {
    out.append(StatsOf(epoch));
  }
  return out;
}

using Order = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void Declare(Port& port, StreamId stream, uint64_t epoch, const Order& order, bool last) {
  std::vector<SampleId> samples(order.data(), order.data() + order.size());
  Raise(Unlocked([&] { return port.Declare(stream, epoch, std::move(samples), last); }));
}

}  // namespace

nb::dict StatsOf(const EpochStats& e) {
  nb::dict d;
  d["epoch"] = e.epoch;
  d["batches"] = e.batches;
  d["samples"] = e.samples;
  d["bytes"] = e.bytes;
  d["source_reads"] = e.source_reads;
  d["source_bytes"] = e.source_bytes;
  d["peer_reads"] = e.peer_reads;
  d["peer_bytes"] = e.peer_bytes;
  d["seconds"] = static_cast<double>(e.wall_ns) * 1e-9;
  nb::dict wait;
  for (size_t i = 0; i < kStallCauses; ++i) {
    wait[nb::str(kStallCauseNames[i].data(), kStallCauseNames[i].size())] =
        static_cast<double>(e.wait_ns[i]) * 1e-9;
  }
  d["wait"] = wait;
  d["batch_us"] = Array(std::vector<uint32_t>(e.batch_us));
  return d;
}

StallCause CauseAt(size_t place) {
  if (place >= kStallCauses) throw nb::index_error("no such cause");
  return static_cast<StallCause>(place);
}

template <typename Handle>
void BindStreams(nb::class_<Handle>& c) {
  c.def(
       "open_stream",
       [](const Handle& e, const StreamOptions& options) {
         return Value(Unlocked([&] { return e.port->OpenStream(options); }));
       },
       nb::arg("options"))
      .def(
          "declare",
          [](const Handle& e, StreamId s, uint64_t epoch, const Order& order, bool last) {
            Declare(*e.port, s, epoch, order, last);
          },
          nb::arg("stream"), nb::arg("epoch"), nb::arg("order"), nb::arg("last") = false)
      .def(
          "seek",
          [](const Handle& e, StreamId s, uint64_t epoch, uint64_t position) {
            Raise(Unlocked([&] { return e.port->Seek(s, epoch, position); }));
          },
          nb::arg("stream"), nb::arg("epoch"), nb::arg("position"))
      .def(
          "close_stream",
          [](const Handle& e, StreamId s) {
            Raise(Unlocked([&] { return e.port->CloseStream(s); }));
          },
          nb::arg("stream"))
      .def(
          "take",
          [](const Handle& e, StreamId s, double wait_s, nb::handle held) {
            return Take(e.port, s, wait_s, held);
          },
          nb::arg("stream"), nb::arg("wait_s"), nb::arg("held") = nb::none(),
          "A Batch; None when `wait_s` seconds passed; or 'end of epoch' or 'end of stream'. It is "
          "also in `held.item`.")
      .def(
          "fetch",
          [](const Handle& e, StreamId s, SampleId sample, double wait_s) {
            return Fetch(e.port, s, sample, wait_s);
          },
          nb::arg("stream"), nb::arg("sample"), nb::arg("wait_s"),
          "One sample as a Batch, or None.")
      .def(
          "stats", [](const Handle& e, StreamId s) { return Stats(*e.port, s); }, nb::arg("stream"))
      .def(
          "stalled",
          [](const Handle& e, StreamId s, size_t cause, double seconds) {
            e.port->CountStall(s, CauseAt(cause), static_cast<Nanos>(seconds * kSecond));
          },
          nb::arg("stream"), nb::arg("cause"), nb::arg("seconds"),
          "A consumer behind the stream's workers waited; `cause` is a place in STALL_CAUSES.")
      .def(
          "files_changed",
          [](const Handle& e, StreamId s) {
            const ChangedFilesOf changed = Value(Unlocked([&] { return e.port->ChangedFiles(s); }));
            return std::pair(changed.count, FileText(changed.last));
          },
          nb::arg("stream"),
          "How many files of the stream's data set changed since they were looked at, and the last "
          "one in words.")
      .def(
          "waiting_for",
          [](const Handle& e, StreamId s) {
            return FileText(Unlocked([&] { return e.port->WaitingFor(s); }));
          },
          nb::arg("stream"))
      .def("prometheus",
           [](const Handle& e) { return Value(Unlocked([&] { return e.port->MetricsText(); })); })
      .def_prop_ro("budget", [](const Handle& e) { return e.port->budget(); });
}

template void BindStreams(nb::class_<EngineHandle>& c);
template void BindStreams(nb::class_<PortHandle>& c);

std::shared_ptr<Port> PortOf(nb::handle engine) {
  if (nb::isinstance<PortHandle>(engine)) return nb::cast<const PortHandle&>(engine).port;
  return nb::cast<const EngineHandle&>(engine).port;
}

void BindStreamOptions(nb::module_& m) {
  nb::class_<StreamOptions>(m, "StreamOptions", "What a stream hands out, and where it begins.")
      .def(
          "__init__",
          [](StreamOptions* self, DatasetId dataset, uint32_t batch_size, bool drop_last,
             bool contiguous, bool itemised, bool declared, uint32_t size, bool shuffle,
             uint64_t seed, uint32_t rank, uint32_t world, bool sampler_drop_last, uint64_t epochs,
             uint64_t first_epoch, uint64_t first_position, uint32_t exchange,
             uint32_t ranks_per_node) {
            StreamOptions options;
            options.shape = {dataset,  batch_size,  drop_last,      contiguous,
                             itemised, first_epoch, first_position, epochs};
            options.declared = declared;
            options.sampler = {size,  shuffle,           seed,     rank,
                               world, sampler_drop_last, exchange, ranks_per_node};
            new (self) StreamOptions(std::move(options));
          },
          nb::arg("dataset"), nb::arg("batch_size"), nb::arg("drop_last") = false,
          nb::arg("contiguous") = false, nb::arg("itemised") = false, nb::arg("declared") = false,
          nb::arg("size") = 0, nb::arg("shuffle") = true, nb::arg("seed") = 0, nb::arg("rank") = 0,
          nb::arg("world") = 1, nb::arg("sampler_drop_last") = false, nb::arg("epochs") = 0,
          nb::arg("first_epoch") = 0, nb::arg("first_position") = 0, nb::arg("exchange") = 0,
          nb::arg("ranks_per_node") = 1);
}

}  // namespace forebay::python
