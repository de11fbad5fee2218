#include "tier/copy_names.h"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/rng.h"
#include "catalog/paths.h"

namespace forebay {
namespace {

constexpr uint64_t kStirA = 0x87c37b91114253d5;
constexpr uint64_t kStirB = 0x4cf5ad432745937f;

uint64_t Scatter(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccd;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53;
  return x ^ (x >> 33);
}

uint64_t GroupOf(std::string_view root) {
  NameHash hash;
  hash.Add(root);
  return hash.Finish()[0];
}

// `folder` has its path in it.
TierKey NameIn(uint64_t group, NameHash folder, std::string_view name, uint64_t size,
               int64_t mtime_ns, uint64_t offset, uint64_t length) {
  folder.Add(name);
  folder.Add(size);
  folder.Add(static_cast<uint64_t>(mtime_ns));
  folder.Add(offset);
  folder.Add(length);
  const std::array<uint64_t, 2> hash = folder.Finish();
  return {.group = group, .name = hash[0], .check = static_cast<uint32_t>(hash[1])};
}

// Like no other, of this process or of one before it.
uint64_t NewOpening() {
  static std::atomic<uint64_t> last = [] {
    uint64_t token = 0;
    if (::getrandom(&token, sizeof token, 0) != sizeof token) token = 0;
    return token ^ static_cast<uint64_t>(SteadyClock().Now());
  }();
  return ++last;
}

}  // namespace

// The steps and constants are those of MurmurHash3 for 128 bits (A. Appleby, public domain), with
// every word in both halves.
void NameHash::Add(uint64_t word) {
  a_ ^= std::rotl(word * kStirA, 31) * kStirB;
  a_ = (std::rotl(a_, 27) + b_) * 5 + 0x52dce729;
  b_ ^= std::rotl(word * kStirB, 33) * kStirA;
  b_ = (std::rotl(b_, 31) + a_) * 5 + 0x38495ab5;
  ++words_;
}

void NameHash::Add(std::string_view text) {
  Add(uint64_t{text.size()});
  while (!text.empty()) {
    uint64_t word = 0;
    const size_t bytes = text.size() < sizeof word ? text.size() : sizeof word;
    std::memcpy(&word, text.data(), bytes);
    Add(word);
    text.remove_prefix(bytes);
  }
}

std::array<uint64_t, 2> NameHash::Finish() const {
  uint64_t a = a_ ^ words_;
  uint64_t b = b_ ^ words_;
  a += b;
  b += a;
  a = Scatter(a);
  b = Scatter(b);
  a += b;
  b += a;
  return {a, b};
}

TierKey WholeFileName(std::string_view root, std::string_view path, uint64_t size,
                      int64_t mtime_ns) {
  const size_t slash = path.rfind('/');
  NameHash folder;
  folder.Add(path.substr(0, std::max<size_t>(slash, 1)));  // the root of all is "/"
  return NameIn(GroupOf(root), folder, path.substr(slash + 1), size, mtime_ns, 0, size);
}

CopyNames::CopyNames(std::shared_ptr<const Catalog> catalog)
    : catalog_(std::move(catalog)),
      root_(RealPath(catalog_->root())),
      group_(GroupOf(root_)),
      opening_(NewOpening()) {
  if (catalog_->format() == Format::kGrowing) return;
  folders_.reserve(catalog_->folder_count());
  for (uint32_t folder = 0; folder < catalog_->folder_count(); ++folder) {
    folders_.push_back(HashFolder(folder));
  }
}

NameHash CopyNames::HashFolder(uint32_t folder) const {
  NameHash path;
  path.Add(JoinPath(root_, catalog_->FolderBelow(folder)));
  return path;
}

TierKey CopyNames::Of(SampleId sample) const {
  const Extent extent = catalog_->extent(sample);
  const uint32_t folder = catalog_->folder(extent.object);
  return NameIn(group_, folders_.empty() ? HashFolder(folder) : folders_[folder],
                catalog_->ObjectName(extent.object), catalog_->ObjectSize(extent.object),
                catalog_->ObjectTime(extent.object), extent.offset, extent.length);
}

uint32_t CopyNames::StampOfFile(SampleId sample) const {
  if (catalog_->stamps() == nullptr) return 0;
  const uint32_t stamp = catalog_->ChangeStamp(catalog_->object(sample));
  if (!WasYoung(stamp)) return stamp;
  return std::max(static_cast<uint32_t>(SplitMix64(stamp ^ opening_).Next()) & ~1U, 2U);
}

}  // namespace forebay
