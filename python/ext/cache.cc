#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "files/identity.h"
#include "handles.h"
#include "tier/copy_names.h"
#include "tier/folder_admin.h"

namespace forebay::python {
namespace {

struct CacheHandle {
  FolderAdmin admin;
};

using Name = std::pair<uint64_t, uint32_t>;
TierKey KeyOf(const Name& name) { return {.group = 0, .name = name.first, .check = name.second}; }

// Copies of files as they were before they changed: of those that a run has opened the copy tells
// whose it is, and the newest of a path counts.
FolderAdmin::Held FormerOf(const FolderAdmin& admin, uint64_t group) {
  struct Newest {
    timespec changed = {};
    uint64_t bytes = 0;
  };
  std::map<std::string, Newest> paths;
  FolderAdmin::Held former;
  const auto identity = std::make_unique<files::Identity>();
  for (const TierKey& key : admin.Keys(group)) {
    const std::string file = admin.FileOf(key);
    if (file.empty() || files::ReadIdentityAt(file.c_str(), identity.get()) != 0) continue;
    Newest now = {identity->stat.st_mtim, static_cast<uint64_t>(identity->stat.st_size)};
    const auto [it, fresh] = paths.try_emplace(std::string(identity->path), now);
    if (fresh) continue;
    const bool newer = std::pair(now.changed.tv_sec, now.changed.tv_nsec) >
                       std::pair(it->second.changed.tv_sec, it->second.changed.tv_nsec);
    if (newer) std::swap(it->second, now);
    ++former.copies;
    former.bytes += now.bytes;
  }
  return former;
}

}  // namespace

void BindCache(nb::module_& m) {
  nb::class_<CacheHandle>(m, "CacheFolder", "A folder of cache_dir=, to be listed and changed.")
      .def_static(
          "open",
          [](const std::string& folder, bool change, const std::string& group) {
            Result<FolderAdmin> admin = [&] {
              WaitUnlocked unlocked;
              return FolderAdmin::Open(folder, change, group);
            }();
            return std::make_unique<CacheHandle>(CacheHandle{Value(std::move(admin))});
          },
          nb::arg("folder"), nb::arg("change") = false, nb::arg("group") = "",
          "Takes the folder's lock when it is to be changed.")
      .def_prop_ro("foreign", [](const CacheHandle& c) { return FileText(c.admin.foreign()); })
      .def_prop_ro("used_bytes", [](const CacheHandle& c) { return c.admin.used_bytes(); })
      .def_prop_ro("limit_bytes", [](const CacheHandle& c) { return c.admin.limit_bytes(); })
      .def_prop_ro("writer", [](const CacheHandle& c) { return c.admin.writer(); })
      .def(
          "datasets",
          [](const CacheHandle& c) {
            nb::list all;
            for (const CachedGroup& each : c.admin.groups()) {
              nb::dict one;
              one["dataset"] = each.group;
              one["path"] = FileText(each.path);
              one["samples"] = each.copies;
              one["bytes"] = each.bytes;
              one["last_used"] = each.last_used_s;
              all.append(one);
            }
            return all;
          },
          "What it holds: dataset, path, samples, bytes, last_used (seconds since 1970).")
      .def(
          "held",
          [](const CacheHandle& c, const CatalogHandle& catalog) {
            WaitUnlocked unlocked;
            const FolderAdmin::Held held = c.admin.HeldOf(catalog.catalog);
            return std::pair(held.copies, held.bytes);
          },
          nb::arg("catalog"), "(samples of a data set that it has, their bytes)")
      .def(
          "former",
          [](const CacheHandle& c, uint64_t dataset) {
            WaitUnlocked unlocked;
            const FolderAdmin::Held held = FormerOf(c.admin, dataset);
            return std::pair(held.copies, held.bytes);
          },
          nb::arg("dataset"),
          "(copies of files as they were before they changed, their bytes): of files that a run "
          "has opened.")
      .def(
          "samples",
          [](const CacheHandle& c, uint64_t dataset) {
            std::vector<Name> names;
            for (const TierKey& key : c.admin.Keys(dataset))
              names.emplace_back(key.name, key.check);
            return names;
          },
          nb::arg("dataset"), "The names of its copies, each a pair of numbers.")
      .def(
          "check",
          [](CacheHandle& c, const std::vector<Name>& samples) {
            std::vector<Name> bad;
            uint64_t read = 0;
            Status status;
            {
              WaitUnlocked unlocked;
              for (const Name& name : samples) {
                uint64_t bytes = 0;
                Result<bool> good = c.admin.Check(KeyOf(name), &bytes);
                if (!good) {
                  status = good.error();
                  break;
                }
                read += bytes;
                if (!*good) bad.push_back(name);
              }
            }
            Raise(status);
            return std::pair(bad, read);
          },
          nb::arg("samples"), "(those whose copy is bad, bytes read)")
      .def(
          "compare",
          [](CacheHandle& c, const CatalogHandle& catalog, uint32_t first, uint32_t count) {
            std::vector<Name> differ;
            uint64_t read = 0;
            uint64_t held = 0;
            Status status;
            {
              WaitUnlocked unlocked;
              const Catalog& whole = *catalog.catalog;
              const CopyNames names(catalog.catalog);
              const uint64_t end = std::min<uint64_t>(whole.size(), uint64_t{first} + count);
              for (uint64_t s = first; s < end; ++s) {
                const auto sample = static_cast<SampleId>(s);
                const TierKey key = names.Of(sample);
                uint64_t bytes = 0;
                const Result<FolderAdmin::Compared> found =
                    c.admin.Compare(whole, key, sample, &bytes);
                if (!found) {
                  status = found.error();
                  break;
                }
                read += bytes;
                held += *found == FolderAdmin::Compared::kNone ? 0 : 1;
                if (*found == FolderAdmin::Compared::kDiffers) {
                  differ.emplace_back(key.name, key.check);
                }
              }
            }
            Raise(status);
            return std::tuple(differ, held, read);
          },
          nb::arg("catalog"), nb::arg("first"), nb::arg("count"),
          "(copies that are not what their files hold, copies compared, bytes read) of samples.")
      .def(
          "drop", [](CacheHandle& c, const Name& sample) { Raise(c.admin.Drop(KeyOf(sample))); },
          nb::arg("sample"))
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
