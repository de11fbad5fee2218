// Small trees decoded from the input and made on disk; the catalog's order is compared with a plain
// walk that does what torchvision's ImageFolder does, one call after the other.
#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "catalog/test_data.h"
#include "expect.h"

namespace {

using forebay::StrCat;

constexpr const char* kNames[] = {"a",     "a-b",    "a.b",   "B",  ".h",  "x.jpg",
                                  "x.JPG", "y.jpg",  "y.txt", "z",  "z z", "\xc3\xa9",
                                  "0.jpg", "10.jpg", "9.jpg", "a/b"};
constexpr size_t kMaxSteps = 24;

using Identity = std::pair<dev_t, ino_t>;

struct Expected {
  std::vector<std::string> classes;
  std::vector<std::string> samples;  // "path label size"
  bool fails = false;
};

std::vector<std::string> Entries(const std::string& folder) {
  std::vector<std::string> out;
  DIR* dir = ::opendir(folder.c_str());
  FUZZ_EXPECT(dir != nullptr);
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") out.push_back(name);
  }
  ::closedir(dir);
  std::sort(out.begin(), out.end());
  return out;
}

bool Matches(std::string name, bool jpg_only) {
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return !jpg_only || (name.size() >= 4 && name.substr(name.size() - 4) == ".jpg");
}

Identity IdentityOf(const std::string& path) {
  struct stat st;
  FUZZ_EXPECT(::stat(path.c_str(), &st) == 0);
  return {st.st_dev, st.st_ino};
}

// The folders below and including `path`, as os.walk(followlinks=True) meets them.
void Walk(const std::string& path, std::set<Identity> above, std::vector<std::string>& out) {
  if (!above.insert(IdentityOf(path)).second) return;
  out.push_back(path);
  for (const std::string& name : Entries(path)) {
    struct stat st;
    const std::string child = StrCat(path, "/", name);
    if (::stat(child.c_str(), &st) == 0 && S_ISDIR(st.st_mode)) Walk(child, above, out);
  }
}

void TakeFiles(const std::string& root, const std::string& folder, int label, bool jpg_only,
               Expected& out) {
  for (const std::string& name : Entries(folder)) {
    if (!Matches(name, jpg_only)) continue;
    const std::string path = StrCat(folder, "/", name);
    struct stat st;
    if (::stat(path.c_str(), &st) != 0) {
      out.fails = true;
    } else if (S_ISREG(st.st_mode)) {
      out.samples.push_back(StrCat(path.substr(root.size() + 1), " ", label, " ", st.st_size));
    }
  }
}

Expected Reference(const std::string& root, bool jpg_only) {
  Expected out;
  for (const std::string& name : Entries(root)) {
    struct stat st;
    if (::stat(StrCat(root, "/", name).c_str(), &st) == 0 && S_ISDIR(st.st_mode)) {
      out.classes.push_back(name);
    }
  }
  if (out.classes.empty()) TakeFiles(root, root, -1, jpg_only, out);
  for (size_t c = 0; c < out.classes.size(); ++c) {
    std::vector<std::string> folders;
    Walk(StrCat(root, "/", out.classes[c]), {IdentityOf(root)}, folders);
    std::sort(folders.begin(), folders.end());
    for (const std::string& folder : folders) {
      TakeFiles(root, folder, static_cast<int>(c), jpg_only, out);
    }
  }
  out.fails |= out.samples.empty();
  return out;
}

// Three bytes a step: what, where, which name. Steps that make no sense do nothing.
void MakeTree(const std::string& root, const uint8_t* data, size_t size) {
  std::vector<std::string> folders = {root};
  for (size_t i = 0; i + 3 <= size && i < 3 * kMaxSteps; i += 3) {
    const std::string& parent = folders[data[i + 1] % folders.size()];
    const std::string path = StrCat(parent, "/", kNames[data[i + 2] % std::size(kNames)]);
    const std::string target = folders[(data[i] / 8) % folders.size()];
    switch (data[i] % 8) {
      case 0:
      case 1:
      case 2:
        if (::mkdir(path.c_str(), 0700) == 0) folders.push_back(path);
        break;
      case 3:
      case 4:
      case 5: {
        const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0) break;
        FUZZ_EXPECT(::ftruncate(fd, data[i] / 8) == 0);
        ::close(fd);
        break;
      }
      case 6:
        (void)!::symlink(target.c_str(), path.c_str());
        break;
      default:
        (void)!::symlink(data[i] / 8 % 4 == 0 ? "nowhere" : "x.jpg", path.c_str());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  forebay::testing::TempFolder temp;
  FUZZ_EXPECT(!temp.path().empty());
  MakeTree(temp.path(), data + 1, size - 1);
  forebay::BuildOptions options;
  options.format = "folder";
  options.threads = 1 + data[0] / 2 % 4;
  const bool jpg_only = data[0] % 2 == 1;
  if (jpg_only) options.extensions = {".jpg"};
  const Expected expected = Reference(temp.path(), jpg_only);
  auto catalog = forebay::BuildCatalog(temp.path(), options);
  FUZZ_EXPECT(catalog.has_value() != expected.fails);
  if (!catalog) {
    FUZZ_EXPECT(catalog.error().message().find(temp.path()) != std::string::npos);
    return 0;
  }
  const forebay::Catalog& c = **catalog;
  FUZZ_EXPECT(c.Classes() == expected.classes);
  FUZZ_EXPECT(c.size() == expected.samples.size());
  for (forebay::SampleId s = 0; s < c.size(); ++s) {
    FUZZ_EXPECT(StrCat(c.SampleName(s), " ", c.label(s), " ", c.length(s)) == expected.samples[s]);
  }
  FUZZ_EXPECT(c.CheckFresh().ok());
  FUZZ_EXPECT(c.Verify(nullptr).ok());
  return 0;
}
