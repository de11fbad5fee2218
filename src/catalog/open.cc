#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "base/trusted_files.h"
#include "catalog/catalog.h"
#include "catalog/paths.h"

namespace forebay {
namespace {

// FNV-1a with a final mix. File names must not change between builds of Forebay.
uint64_t Hash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (char c : text) {
    hash ^= static_cast<uint8_t>(c);
    hash *= 0x100000001b3ULL;
  }
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93ULL;
  return hash ^ (hash >> 32);
}

std::string Hex(uint64_t value) {
  std::string out(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) out[i] = "0123456789abcdef"[value & 15];
  return out;
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Empty where the environment names none.
std::string CacheFolder() {
  if (std::string folder = Variable("FOREBAY_CACHE_DIR"); !folder.empty()) return folder;
  // The XDG specification says to ignore relative values.
  if (std::string xdg = Variable("XDG_CACHE_HOME"); !xdg.empty() && xdg.front() == '/') {
    return JoinPath(xdg, "forebay");
  }
  if (std::string home = Variable("HOME"); !home.empty()) return JoinPath(home, ".cache/forebay");
  return "";
}

// Not ok: somebody else could put files into the folder, or move those that are there. A sticky
// folder, such as /tmp, is none: there a file's owner tells who put it there.
Status CheckFolder(const std::string& folder) {
  struct stat st = {};
  if (::stat(folder.c_str(), &st) != 0) return Status();  // Load and Save tell
  const bool own = st.st_uid == ::geteuid();
  // The folder of our own name was made by Forebay, once for others to see. What others have put
  // into it is theirs, or theirs to write, and not loaded.
  if (own && Variable("FOREBAY_CACHE_DIR").empty()) {
    if ((st.st_mode & (S_IRWXG | S_IRWXO)) != 0) (void)::chmod(folder.c_str(), 0700);
    return Status();
  }
  const bool shared = (st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0;
  if ((own || st.st_uid == 0) && !shared) return Status();
  return Status(Code::kPermissionDenied,
                StrCat("others may write to ", folder, " (", OwnerAndMode(st),
                       "): no catalog is loaded from there or saved there; ",
                       own ? StrCat("chmod go-w ", folder, ", or ") : "",
                       "set FOREBAY_CACHE_DIR to a folder that only you can write to"));
}

// The saved catalog when it can be used; else nothing, with the reason in `note` where a person
// would want to know it.
std::unique_ptr<Catalog> LoadFresh(const std::string& file, const std::string& path,
                                   std::string& note) {
  Result<std::unique_ptr<Catalog>> saved = Catalog::LoadOwn(file);
  if (!saved) {
    if (saved.error().code() != Code::kNotFound) note = saved.error().message();
    return nullptr;
  }
  const Catalog& catalog = **saved;
  // Two data sets whose names collide share a file.
  const bool ours =
      catalog.root() == path || (catalog.object_count() == 1 && catalog.ObjectPath(0) == path);
  if (!ours) return nullptr;
  if (!catalog.has_object_times()) {
    note = StrCat(file, " is of an older version: ", path, " is listed again");
    return nullptr;
  }
  const Status fresh = catalog.CheckFresh();
  if (!fresh.ok()) {
    note = fresh.message();
    return nullptr;
  }
  return std::move(*saved);
}

}  // namespace

std::string DefaultCatalogFile(const std::string& path, const BuildOptions& options) {
  const std::string folder = CacheFolder();
  if (folder.empty()) return "";
  const Result<std::string> absolute = AbsolutePath(path);
  const std::string& full = absolute ? *absolute : path;
  std::string key = full;
  key.append(1, '\0').append(options.format);
  for (const std::string& extension : options.extensions) key.append(1, '\0').append(extension);
  // A readable part, for those who look into the folder.
  std::string label(BaseName(full).substr(0, 48));
  for (char& c : label) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.';
    if (!plain) c = '_';
  }
  return JoinPath(folder, StrCat(label, "-", Hex(Hash(key)), ".catalog"));
}

Result<OpenedCatalog> OpenOrBuild(const std::string& path, const BuildOptions& options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  Result<std::string> absolute = AbsolutePath(path);
  if (!absolute) return absolute.error();
  const std::string file = DefaultCatalogFile(*absolute, options);
  OpenedCatalog out;
  const Status trusted = CheckFolder(std::string(DirName(file)));
  out.note = trusted.message();
  if (!file.empty() && trusted.ok()) {
    out.catalog = LoadFresh(file, *absolute, out.note);
    if (out.catalog != nullptr) return out;
  }
  Result<std::unique_ptr<Catalog>> built = BuildCatalog(*absolute, options);
  if (!built) return built.error();
  out.catalog = std::move(*built);
  out.rebuilt = true;
  if (!trusted.ok()) return out;
  if (out.catalog->sizer() != nullptr && !file.empty()) {
    out.catalog->SaveWhenComplete(file);
    return out;
  }
  const Status saved =
      file.empty() ? Status(Code::kNotFound, "no cache folder; set FOREBAY_CACHE_DIR or HOME")
                   : out.catalog->Save(file, Catalog::Access::kOwner);
  if (!saved.ok()) {
    out.note = StrCat(out.note, out.note.empty() ? "" : "; ", "the catalog of ", *absolute,
                      " is not saved, the next start lists it again: ", saved.message());
    return out;
  }
  // Mapped from the file it costs page cache, not this process's memory.
  Result<std::unique_ptr<Catalog>> mapped = Catalog::LoadOwn(file);
  if (mapped && (*mapped)->fingerprint() == out.catalog->fingerprint()) {
    out.catalog = std::move(*mapped);
  }
  return out;
}

}  // namespace forebay
