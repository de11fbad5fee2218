#include <exception>
#include <optional>
#include <tuple>

#include "common.h"

#include "catalog/catalog.h"
#include "core/sampler.h"
#include "handles.h"

namespace forebay::python {
namespace {

// Calls Python's progress function from C++ threads. Its exception, or Ctrl-C, cancels the work and
// goes before the "cancelled" that it causes.
class Progress {
 public:
  explicit Progress(nb::object function) : function_(std::move(function)) {}

  template <typename... Numbers>
  bool operator()(Numbers... numbers) {
    nb::gil_scoped_acquire locked;
    try {
      if (SignalRaised()) throw nb::python_error();
      if (!function_.is_none()) function_(numbers...);
      return true;
    } catch (nb::python_error&) {
      error_ = std::current_exception();
      return false;
    }
  }

  void Rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  nb::object function_;
  std::exception_ptr error_;
};

// The catalog with all its lengths; Ctrl-C ends the wait for them.
const Catalog& Whole(const CatalogHandle& c) {
  constexpr Nanos kSlice = 50 * kMilli;
  while (!c.catalog->complete()) {
    Status status;
    {
      WaitUnlocked unlocked;
      status = c.catalog->WaitComplete(kSlice);
    }
    if (SignalRaised()) throw nb::python_error();
    if (status.code() != Code::kUnavailable) Raise(status);
  }
  return *c.catalog;
}

template <typename Build>
auto Run(const std::string& format, std::vector<std::string> extensions, nb::object function,
         Build build, bool sizes_later = false, bool look = true) {
  Progress progress(std::move(function));
  BuildOptions options;
  options.format = format;
  options.extensions = std::move(extensions);
  options.sizes_later = sizes_later;
  options.look_at_files = look;
  options.progress = [&](uint64_t done, uint64_t total, uint64_t samples) {
    return progress(done, total, samples);
  };
  auto result = [&] {
    WaitUnlocked unlocked;
    return build(options);
  }();
  progress.Rethrow();
  return Value(std::move(result));
}

// What epoch_order takes, but for the size, which the catalog tells.
using FirstEpoch =
    std::tuple<bool, uint64_t, uint64_t, uint32_t, uint32_t, bool, uint32_t, uint32_t>;

std::vector<SampleId> OrderOf(const FirstEpoch& first, size_t samples) {
  const auto& [shuffle, seed, epoch, rank, world, drop_last, exchange, ranks_per_node] = first;
  const SamplerSpec spec{.size = static_cast<uint32_t>(samples),
                         .shuffle = shuffle,
                         .seed = seed,
                         .rank = rank,
                         .world = world,
                         .drop_last = drop_last,
                         .exchange = exchange,
                         .ranks_per_node = ranks_per_node};
  // What is wrong with it is told by the stream.
  return spec.Validate().ok() ? EpochOrder(spec, epoch) : std::vector<SampleId>();
}

const char* FormatName(Format format) {
  switch (format) {
    case Format::kFolder:
      return "folder";
    case Format::kWebDataset:
      return "webdataset";
    case Format::kTfRecord:
      return "tfrecord";
    case Format::kFileList:
      return "files";
    case Format::kGrowing:
      return "growing";
  }
  return "unknown";
}

SampleId Check(const Catalog& catalog, int64_t sample) {
  if (sample < 0 || static_cast<uint64_t>(sample) >= catalog.size()) {
    throw nb::index_error(StrCat("sample ", sample, " of ", catalog.size()).c_str());
  }
  return static_cast<SampleId>(sample);
}

}  // namespace

void BindCatalog(nb::module_& m) {
  nb::class_<CatalogHandle>(m, "Catalog", "Map from samples to the bytes of their files.")
      .def_static(
          "open",
          [](const std::string& path, const std::string& format,
             std::vector<std::string> extensions, nb::object progress, const EngineHandle* engine,
             bool sizes_later, bool look, const std::optional<FirstEpoch>& first,
             const LooksHandle* looks) {
            std::shared_ptr<CatalogHandle::Early> early;
            if (engine != nullptr) early = std::make_shared<CatalogHandle::Early>(engine->engine);
            OpenedCatalog opened = Run(
                format, std::move(extensions), progress,
                [&](BuildOptions o) {
                  if (early) o.early = &early->samples;
                  if (first) o.first_needed = [&](size_t n) { return OrderOf(*first, n); };
                  if (looks != nullptr) o.looks = looks->looks.get();
                  return OpenOrBuild(path, o);
                },
                sizes_later, look);
            if (early && early->samples.size() == 0) early.reset();
            return nb::make_tuple(CatalogHandle{std::move(opened.catalog), std::move(early)},
                                  opened.rebuilt, opened.note);
          },
          nb::arg("path"), nb::arg("format") = "",
          nb::arg("extensions") = std::vector<std::string>(), nb::arg("progress") = nb::none(),
          nb::arg("engine") = nb::none(), nb::arg("sizes_later") = false, nb::arg("look") = true,
          nb::arg("first") = nb::none(), nb::arg("looks") = nb::none(),
          "(catalog, rebuilt, note): the saved catalog when it is fresh, else a new one, saved. "
          "What is read on the way goes to `engine`, which takes it over by add_dataset. "
          "`sizes_later`: a new one of loose files is there before it is complete. `look`: every "
          "file of a saved one is looked at, and taken as it is now. `first`: (shuffle, seed, "
          "epoch, "
          "rank, world, drop_last, exchange, ranks_per_node), whose samples are looked at first. "
          "`looks`: of this once, the way to other ranks; one of them looks, for all.")
      .def_static(
          "build",
          [](const std::string& path, const std::string& format,
             std::vector<std::string> extensions, nb::object progress) {
            return CatalogHandle{Run(format, std::move(extensions), progress,
                                     [&](const BuildOptions& o) { return BuildCatalog(path, o); })};
          },
          nb::arg("path"), nb::arg("format") = "",
          nb::arg("extensions") = std::vector<std::string>(), nb::arg("progress") = nb::none(),
          "Lists the data set anew.")
      .def_static(
          "from_files",
          [](std::vector<std::string> paths, nb::object progress) {
            return CatalogHandle{Run(
                "", {}, progress, [&](const BuildOptions& o) { return BuildFileList(paths, o); })};
          },
          nb::arg("paths"), nb::arg("progress") = nb::none(),
          "One sample for each path, in this order.")
      .def_static(
          "open_files",
          [](std::vector<std::string> paths, nb::object progress, bool look,
             const LooksHandle* looks) {
            OpenedCatalog opened = Run(
                "", {}, progress,
                [&](BuildOptions o) {
                  if (looks != nullptr) o.looks = looks->looks.get();
                  return OpenFileList(paths, o);
                },
                false, look);
            return nb::make_tuple(CatalogHandle{std::move(opened.catalog)}, opened.rebuilt,
                                  opened.note, FileText(opened.file));
          },
          nb::arg("paths"), nb::arg("progress") = nb::none(), nb::arg("look") = true,
          nb::arg("looks") = nb::none(),
          "(catalog, rebuilt, note, file): as from_files, but the saved catalog of the same list "
          "when no folder of its files has changed since; `look` and `looks` as in open. `file`: "
          "where it is "
          "saved, if it is.")
      .def_static(
          "load",
          [](const std::string& file) {
            Result<std::unique_ptr<Catalog>> loaded = [&] {
              WaitUnlocked unlocked;
              return Catalog::Load(file);
            }();
            return CatalogHandle{Value(std::move(loaded))};
          },
          nb::arg("file"))
      .def_static(
          "default_file",
          [](const std::string& path, const std::string& format,
             std::vector<std::string> extensions) {
            BuildOptions options;
            options.format = format;
            options.extensions = std::move(extensions);
            return DefaultCatalogFile(path, options);
          },
          nb::arg("path"), nb::arg("format") = "",
          nb::arg("extensions") = std::vector<std::string>())
      .def(
          "save",
          [](const CatalogHandle& c, const std::string& file) { Raise(Whole(c).Save(file)); },
          nb::arg("file"))
      .def_prop_ro(
          "complete", [](const CatalogHandle& c) { return c.catalog->complete(); },
          "Whether all lengths are known. Whatever depends on them waits until they are.")
      .def(
          "wait", [](const CatalogHandle& c) { (void)Whole(c); }, "Until all lengths are known.")
      .def_prop_ro(
          "save_note", [](const CatalogHandle& c) { return c.catalog->SaveNote(); },
          "Why a catalog that became complete later was not saved; empty where nothing is wrong.")
      .def(
          "check_fresh",
          [](const CatalogHandle& c) {
            Status status;
            {
              WaitUnlocked unlocked;
              status = c.catalog->CheckFresh();
            }
            Raise(status);
          },
          "Raises ChangedError when a folder changed since the catalog was made.")
      .def_prop_ro(
          "looked_at", [](const CatalogHandle& c) { return c.catalog->looked_at(); },
          "Whether sizes and times are of this process's own look, not as they were saved.")
      .def(
          "look",
          [](const CatalogHandle& c, const LooksHandle* looks) {
            constexpr size_t kThreads = 64;
            Progress progress{nb::object(nb::none())};
            const Catalog& whole = Whole(c);
            Result<Relooked> looked = [&] {
              WaitUnlocked unlocked;
              const auto tick = [&] { return progress(); };
              if (looks == nullptr) return whole.LookAtFiles(kThreads, tick);
              return whole.LookTogether(*looks->looks, kThreads, tick);
            }();
            progress.Rethrow();
            Relooked found = Value(std::move(looked));
            if (!found.catalog && !whole.looked_at() && found.stamps) {
              const std::span<const std::byte> image = whole.image();
              found.catalog = Value(Catalog::FromImage({image.begin(), image.end()}));
              found.catalog->SetLookedAt(std::move(found.stamps));
            }
            nb::object catalog = nb::none();
            if (found.catalog) catalog = nb::cast(CatalogHandle{std::move(found.catalog)});
            return nb::make_tuple(catalog, found.changed, FileText(found.first));
          },
          nb::arg("looks") = nb::none(),
          "(catalog, changed, path): looks at every loose file. None where this one knows all of "
          "it; "
          "else of the files as they are now, how many have another size or modification time, and "
          "one of them. 0 of them: nobody had looked, or some have another change time only.")
      .def(
          "check_shards",
          [](const CatalogHandle& c) {
            Status status;
            {
              WaitUnlocked unlocked;
              status = c.catalog->CheckShards();
            }
            Raise(status);
          },
          "Raises ChangedError when a shard is another one than the catalog was made from.")
      .def(
          "verify",
          [](const CatalogHandle& c, nb::object function) {
            Progress progress(std::move(function));
            Status status;
            {
              WaitUnlocked unlocked;
              status = c.catalog->Verify(
                  [&](uint64_t done, uint64_t total) { return progress(done, total); });
            }
            progress.Rethrow();
            Raise(status);
          },
          nb::arg("progress") = nb::none(), "Checks every object: existence, size, checksums.")
      .def(
          "drop_early", [](CatalogHandle& c) { c.early.reset(); },
          "Gives back the memory of what was read on the way.")
      .def("__len__", [](const CatalogHandle& c) { return c.catalog->size(); })
      .def_prop_ro("root", [](const CatalogHandle& c) { return FileText(c.catalog->root()); })
      .def_prop_ro("format", [](const CatalogHandle& c) { return FormatName(c.catalog->format()); })
      .def_prop_ro("total_bytes", [](const CatalogHandle& c) { return Whole(c).total_bytes(); })
      .def_prop_ro("max_length", [](const CatalogHandle& c) { return Whole(c).max_length(); })
      .def_prop_ro("objects", [](const CatalogHandle& c) { return c.catalog->object_count(); })
      .def_prop_ro("fingerprint", [](const CatalogHandle& c) { return Whole(c).fingerprint(); })
      .def_prop_ro(
          "version", [](const CatalogHandle& c) { return Whole(c).version(); },
          "As fingerprint, and of paths and times, too: what one version has in memory is not "
          "another's.")
      .def_prop_ro("image_bytes", [](const CatalogHandle& c) { return Whole(c).image().size(); })
      .def_prop_ro("classes",
                   [](const CatalogHandle& c) {
                     nb::list out;
                     for (const std::string& name : c.catalog->Classes())
                       out.append(FileText(name));
                     return out;
                   })
      .def(
          "name",
          [](const CatalogHandle& c, int64_t s) {
            return FileText(c.catalog->SampleName(Check(*c.catalog, s)));
          },
          nb::arg("sample"), "Path relative to the root; shard and key for shards.")
      .def(
          "object_path",
          [](const CatalogHandle& c, int64_t s) {
            return FileText(c.catalog->ObjectPath(c.catalog->object(Check(*c.catalog, s))));
          },
          nb::arg("sample"), "Absolute path of the file that holds the sample.")
      .def(
          "offset",
          [](const CatalogHandle& c, int64_t s) {
            return Whole(c).extent(Check(*c.catalog, s)).offset;
          },
          nb::arg("sample"))
      .def(
          "label",
          [](const CatalogHandle& c, int64_t s) { return c.catalog->label(Check(*c.catalog, s)); },
          nb::arg("sample"))
      .def(
          "length",
          [](const CatalogHandle& c, int64_t s) { return Whole(c).length(Check(*c.catalog, s)); },
          nb::arg("sample"))
      .def("lengths",
           [](const CatalogHandle& c) {
             std::vector<uint32_t> out(c.catalog->size());
             const Catalog& whole = Whole(c);
             for (SampleId s = 0; s < out.size(); ++s) out[s] = whole.length(s);
             return Array(std::move(out));
           })
      .def(
          "fields",
          [](const CatalogHandle& c, int64_t s) {
            std::vector<std::tuple<std::string, uint32_t, uint32_t>> out;
            for (const FieldView& f : Whole(c).Fields(Check(*c.catalog, s))) {
              out.emplace_back(std::string(f.name), f.offset, f.length);
            }
            return out;
          },
          nb::arg("sample"), "(name, offset in the sample, length) of each field.");
}

}  // namespace forebay::python
