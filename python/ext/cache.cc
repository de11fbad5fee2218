#include "common.h"

#include "tier/folder_admin.h"

namespace forebay::python {
namespace {

struct CacheHandle {
  FolderAdmin admin;
};

}  // namespace

void BindCache(nb::module_& m) {
  nb::class_<CacheHandle>(m, "CacheFolder", "A folder of cache_dir=, to be listed and changed.")
      .def_static(
          "open",
          [](const std::string& folder, bool change) {
            Result<FolderAdmin> admin = [&] {
              WaitUnlocked unlocked;
              return FolderAdmin::Open(folder, change);
            }();
            return std::make_unique<CacheHandle>(CacheHandle{Value(std::move(admin))});
          },
          nb::arg("folder"), nb::arg("change") = false,
          "Takes the folder's lock when it is to be changed.")
      .def_prop_ro("foreign", [](const CacheHandle& c) { return FileText(c.admin.foreign()); })
      .def_prop_ro("used_bytes", [](const CacheHandle& c) { return c.admin.used_bytes(); })
      .def_prop_ro("limit_bytes", [](const CacheHandle& c) { return c.admin.limit_bytes(); })
      .def_prop_ro("writer", [](const CacheHandle& c) { return c.admin.writer(); })
      .def(
          "datasets",
          [](const CacheHandle& c) {
            nb::list all;
            for (const CachedDataset& each : c.admin.datasets()) {
              nb::dict one;
              one["dataset"] = each.dataset;
              one["path"] = FileText(each.path);
              one["samples"] = each.samples;
              one["bytes"] = each.bytes;
              one["last_used"] = each.last_used_s;
              all.append(one);
            }
            return all;
          },
          "What it holds: dataset, path, samples, bytes, last_used (seconds since 1970).")
      .def(
          "samples",
          [](const CacheHandle& c, uint64_t dataset) { return c.admin.Samples(dataset); },
          nb::arg("dataset"))
      .def(
          "check",
          [](CacheHandle& c, uint64_t dataset, const std::vector<uint32_t>& samples) {
            std::vector<uint32_t> bad;
            uint64_t read = 0;
            Status status;
            {
              WaitUnlocked unlocked;
              for (const uint32_t sample : samples) {
                uint64_t bytes = 0;
                Result<bool> good = c.admin.Check(dataset, sample, &bytes);
                if (!good) {
                  status = good.error();
                  break;
                }
                read += bytes;
                if (!*good) bad.push_back(sample);
              }
            }
            Raise(status);
            return std::pair(bad, read);
          },
          nb::arg("dataset"), nb::arg("samples"), "(those whose copy is bad, bytes read)")
      .def(
          "drop",
          [](CacheHandle& c, uint64_t dataset, uint32_t sample) {
            Raise(c.admin.Drop(dataset, sample));
          },
          nb::arg("dataset"), nb::arg("sample"))
      .def(
          "clear",
          [](CacheHandle& c, std::optional<uint64_t> dataset) {
            const Status status = [&] {
              WaitUnlocked unlocked;
              return dataset ? c.admin.Clear(*dataset) : c.admin.ClearAll();
            }();
            Raise(status);
          },
          nb::arg("dataset") = nb::none(), "Removes one data set, or everything.");
}

}  // namespace forebay::python
