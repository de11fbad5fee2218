#include "catalog/shard.h"

#include <gtest/gtest.h>

#include <utility>

#include "catalog/catalog.h"
#include "catalog/early_sink.h"
#include "catalog/test_data.h"

namespace forebay {
namespace {

using testing::Bytes;
using testing::Little;
using testing::PaddedTo512;
using testing::PaxRecord;
using testing::SetTarChecksum;
using testing::TarEnd;
using testing::TarHeader;
using testing::TarMember;
using testing::TempFolder;
using testing::TfRecord;
using testing::TfRecordHead;

Result<ShardIndex> Tar(const std::string& bytes) {
  MemoryReader reader("shard.tar", Bytes(bytes));
  return ScanTar(reader, nullptr);
}

Result<ShardIndex> Records(const std::string& bytes) {
  MemoryReader reader("shard.tfrecord", Bytes(bytes));
  return ScanTfRecord(reader, nullptr);
}

void ExpectFails(const Result<ShardIndex>& result, Code code,
                 std::initializer_list<std::string_view> parts) {
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), code) << result.error().ToString();
  for (std::string_view part : parts) {
    EXPECT_NE(result.error().message().find(part), std::string::npos)
        << result.error().message() << "\nlacks " << part;
  }
}

// "key field:bytes field:bytes", as the index says.
std::string Describe(const ShardIndex& index, const std::string& bytes, size_t i) {
  const ShardIndex::Sample& sample = index.samples[i];
  std::string out(index.Key(i));
  const std::vector<std::string>& names = index.schemas[sample.schema];
  for (size_t f = 0; f < names.size(); ++f) {
    const FieldRecord& field = index.fields[sample.first_field + f];
    EXPECT_LE(field.offset + field.length, sample.length);
    out += StrCat(" ", names[f], ":", bytes.substr(sample.offset + field.offset, field.length));
  }
  return out;
}

// A reader that is mostly a hole, and counts what is asked of it.
class SparseReader final : public ByteReader {
 public:
  explicit SparseReader(uint64_t size) : size_(size) {}
  void Put(uint64_t offset, std::string piece) { pieces_[offset] = std::move(piece); }

  const std::string& name() const override { return name_; }
  uint64_t size() const override { return size_; }
  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> dest) override {
    ++reads;
    bytes += dest.size();
    std::fill(dest.begin(), dest.end(), std::byte{0});
    for (const auto& [at, piece] : pieces_) {
      for (size_t i = 0; i < piece.size(); ++i) {
        if (at + i >= offset && at + i - offset < dest.size()) {
          dest[at + i - offset] = static_cast<std::byte>(piece[i]);
        }
      }
    }
    return static_cast<size_t>(std::min<uint64_t>(dest.size(), size_ - offset));
  }

  uint64_t reads = 0;
  uint64_t bytes = 0;

 private:
  const std::string name_ = "sparse";
  const uint64_t size_;
  std::map<uint64_t, std::string> pieces_;
};

TEST(TarName, WebDatasetsRule) {
  // Golden values from Python: ^((?:.*/|)[^.]+)[.]([^/]*)$
  const auto split = [](std::string_view path) {
    std::string_view key;
    std::string field;
    return SplitTarName(path, key, field) ? StrCat(key, "|", field) : "-";
  };
  EXPECT_EQ(split("a.jpg"), "a|jpg");
  EXPECT_EQ(split("a.b.jpg"), "a|b.jpg");
  EXPECT_EQ(split("d/x.jpg"), "d/x|jpg");
  EXPECT_EQ(split("d.e/x.seg.png"), "d.e/x|seg.png");
  EXPECT_EQ(split("a"), "-");
  EXPECT_EQ(split("d/a"), "-");
  EXPECT_EQ(split(".jpg"), "-");
  EXPECT_EQ(split("d/.jpg"), "d/|jpg");
  EXPECT_EQ(split("d.e/.jpg"), "-");
  EXPECT_EQ(split("d.e/f/.jpg"), "d.e/f/|jpg");
  EXPECT_EQ(split("/.jpg"), "/|jpg");
  EXPECT_EQ(split("a."), "a|");
  EXPECT_EQ(split("//.x"), "//|x");
  EXPECT_EQ(split(""), "-");
  EXPECT_EQ(split("__meta.x__"), "-");
  EXPECT_EQ(split("d/__m__.jpg"), "d/__m__|jpg");
  EXPECT_EQ(split("a.JPG"), "a|jpg");
}

TEST(Tar, GroupsMembersIntoSamples) {
  const std::string bytes = TarMember("dir/", "", '5') + TarMember("a.jpg", "picture") +
                            TarMember("a.cls", " 17\n") + TarMember("a.json", "{}") +
                            TarMember("README", "not a sample") + TarMember("b.jpg", "") +
                            TarMember("b.CLS", "seven") + TarMember("link.jpg", "", '2') +
                            TarMember("a.jpg", "again") + TarEnd();
  auto index = Tar(bytes);
  ASSERT_TRUE(index) << index.status().ToString();
  ASSERT_EQ(index->samples.size(), 3u);
  EXPECT_EQ(Describe(*index, bytes, 0), "a jpg:picture cls: 17\n json:{}");
  EXPECT_EQ(Describe(*index, bytes, 1), "b jpg: cls:seven");
  EXPECT_EQ(Describe(*index, bytes, 2), "a jpg:again");
  EXPECT_EQ(index->samples[0].offset, 1024u);
  EXPECT_EQ(index->samples[0].length, 2048u + 2);
  EXPECT_EQ(index->samples[0].label, 17);
  EXPECT_EQ(index->samples[1].label, -1);
  EXPECT_EQ(index->samples[2].label, -1);
}

TEST(Tar, LabelsThatAreNone) {
  for (std::string_view text :
       {"", " ", "1.5", "0x1", "99999999999", "1 2", "000000000000000000000000000000001"}) {
    auto index = Tar(TarMember("a.cls", text));
    ASSERT_TRUE(index);
    EXPECT_EQ(index->samples[0].label, -1) << text;
  }
  auto index = Tar(TarMember("a.cls", "2147483647"));
  ASSERT_TRUE(index);
  EXPECT_EQ(index->samples[0].label, 2147483647);
}

TEST(Tar, LongNames) {
  const std::string deep = std::string(180, 'd') + "/" + std::string(120, 'n');
  const std::string gnu =
      TarMember("././@LongLink", deep + ".jpg" + '\0', 'L') + TarMember("short-name", "gnu") +
      TarMember("././@LongLink", "target" + std::string(1, '\0'), 'K') + TarMember("x.jpg", "k");
  auto index = Tar(gnu);
  ASSERT_TRUE(index) << index.status().ToString();
  ASSERT_EQ(index->samples.size(), 2u);
  EXPECT_EQ(Describe(*index, gnu, 0), deep + " jpg:gnu");
  EXPECT_EQ(Describe(*index, gnu, 1), "x jpg:k") << "a long name is used once";

  const std::string pax = TarMember("g", PaxRecord("comment", "all"), 'g') +
                          TarMember("p",
                                    PaxRecord("mtime", "1.5") + PaxRecord("path", deep + ".jpg") +
                                        PaxRecord("size", "3"),
                                    'x') +
                          TarHeader("short", 0) + PaddedTo512("pax") + TarMember("y.jpg", "y");
  index = Tar(pax);
  ASSERT_TRUE(index) << index.status().ToString();
  ASSERT_EQ(index->samples.size(), 2u);
  EXPECT_EQ(Describe(*index, pax, 0), deep + " jpg:pax");
  EXPECT_EQ(Describe(*index, pax, 1), "y jpg:y");

  const std::string ustar = TarHeader("n.jpg", 1, '0', "some/prefix") + PaddedTo512("u");
  index = Tar(ustar);
  ASSERT_TRUE(index);
  EXPECT_EQ(Describe(*index, ustar, 0), "some/prefix/n jpg:u");
}

TEST(Tar, EndOfArchiveMayBeMissing) {
  const std::string whole = TarMember("a.jpg", "A") + TarMember("b.jpg", "B");
  for (const std::string& bytes :
       {whole, whole + TarEnd(), whole + std::string(512, '\0'), whole + std::string(100, '\0'),
        whole.substr(0, whole.size() - 511)}) {
    auto index = Tar(bytes);
    ASSERT_TRUE(index) << index.status().ToString();
    EXPECT_EQ(index->samples.size(), 2u);
  }
}

TEST(Tar, DamageIsNamedWithItsOffset) {
  const std::string a = TarMember("a.jpg", std::string(600, 'A'));
  ExpectFails(Tar(""), Code::kDataLoss, {"shard.tar", "empty"});
  ExpectFails(Tar(a + TarMember("b.jpg", "BB").substr(0, 513)), Code::kDataLoss,
              {"shard.tar", "offset 1536", "cut off", "b.jpg"});
  ExpectFails(Tar(a + TarMember("b.jpg", "BB").substr(0, 100)), Code::kDataLoss,
              {"offset 1536", "cut off in a header"});
  std::string damaged = a + TarMember("b.jpg", "BB");
  damaged[1536 + 5] ^= 1;
  ExpectFails(Tar(damaged), Code::kDataLoss, {"shard.tar", "offset 1536", "checksum"});
  std::string size = TarHeader("a.jpg", 0);
  size[125] = 'x';
  SetTarChecksum(size);
  ExpectFails(Tar(size), Code::kDataLoss, {"offset 0", "size"});
  ExpectFails(Tar("\x1f\x8b" + std::string(600, 'z')), Code::kInvalidArgument, {"gzip"});
  ExpectFails(Tar(TarMember("p", "99999 path=x\n", 'x')), Code::kDataLoss, {"pax"});
  ExpectFails(Tar(TarMember("p", "4 =x", 'x')), Code::kDataLoss, {"pax"});
  ExpectFails(Tar(TarMember("p", PaxRecord("size", "-1"), 'x')), Code::kDataLoss, {"pax size"});
  ExpectFails(Tar(TarMember("s.jpg", "", 'S')), Code::kUnimplemented, {"sparse"});
  ExpectFails(Tar(TarMember("a.jpg", "1") + TarMember("a.jpg", "2")), Code::kInvalidArgument,
              {"offset 1024", "two members named 'jpg'"});
}

TEST(Tar, LargeMembersAreSteppedOver) {
  constexpr uint64_t kMember = uint64_t{140} << 20;
  constexpr uint64_t kCount = 20;
  SparseReader reader(kCount * (kMember + 512 + 1024));
  for (uint64_t i = 0; i < kCount; ++i) {
    const uint64_t at = i * (kMember + 512 + 1024);
    reader.Put(at, TarHeader(StrCat(i, ".npy"), kMember));
    reader.Put(at + 512 + kMember, TarMember(StrCat(i, ".cls"), StrCat(i)));
  }
  auto index = ScanTar(reader, nullptr);
  ASSERT_TRUE(index) << index.status().ToString();
  ASSERT_EQ(index->samples.size(), kCount);
  EXPECT_EQ(index->samples[19].label, 19);
  EXPECT_LE(reader.reads, kCount + 2);
  EXPECT_LE(reader.bytes, ShardReader::kPiece + kCount * 4096);
}

TEST(Tar, SmallMembersAreReadInLargePieces) {
  std::string bytes;
  for (int i = 0; i < 5000; ++i) bytes += TarMember(StrCat(i, ".txt"), StrCat("text ", i));
  SparseReader reader(bytes.size());
  reader.Put(0, bytes);
  auto index = ScanTar(reader, nullptr);
  ASSERT_TRUE(index);
  EXPECT_EQ(index->samples.size(), 5000u);
  EXPECT_LE(reader.reads, bytes.size() / ShardReader::kPiece + 2);
}

TEST(Tar, SampleOf4GiBIsAnError) {
  constexpr uint64_t kLimit = uint64_t{1} << 32;
  SparseReader reader(kLimit * 2);
  std::string header = TarHeader("a.npy", 0);
  // Base 256, as GNU tar writes sizes from 8 GiB.
  std::fill(header.begin() + 124, header.begin() + 136, '\0');
  header[124] = static_cast<char>(0x80);
  header[131] = 1;
  SetTarChecksum(header);
  reader.Put(0, header);
  ExpectFails(ScanTar(reader, nullptr), Code::kInvalidArgument, {"'a'", "4294967296", "4 GiB"});

  // Two members below the limit, together above it.
  SparseReader two(kLimit * 2);
  two.Put(0, TarHeader("a.x", kLimit - 1024));
  two.Put(kLimit - 512, TarHeader("a.y", 4096));
  ExpectFails(ScanTar(two, nullptr), Code::kInvalidArgument, {"'a'", "4 GiB"});
}

TEST(TfRecord, WalksRecords) {
  const std::string bytes = TfRecord("one") + TfRecord("") + TfRecord(std::string(3000, 'x'));
  auto index = Records(bytes);
  ASSERT_TRUE(index) << index.status().ToString();
  ASSERT_EQ(index->samples.size(), 3u);
  EXPECT_EQ(index->samples[0].offset, 12u);
  EXPECT_EQ(index->samples[0].length, 3u);
  EXPECT_EQ(index->samples[0].crc, Crc32c(Bytes("one")));
  EXPECT_EQ(index->samples[1].length, 0u);
  EXPECT_EQ(index->samples[1].offset, 12u + 3 + 4 + 12);
  EXPECT_EQ(index->samples[2].length, 3000u);
  auto empty = Records("");
  ASSERT_TRUE(empty);
  EXPECT_TRUE(empty->samples.empty());
}

TEST(TfRecord, DamageIsNamedWithItsOffset) {
  const std::string one = TfRecord("one");
  std::string damaged = one + TfRecord("two");
  damaged[19] ^= 1;
  ExpectFails(Records(damaged), Code::kDataLoss, {"shard.tfrecord", "offset 19", "checksum"});
  for (size_t cut = 1; cut < one.size(); ++cut) {
    ExpectFails(Records(one + one.substr(0, cut)), Code::kDataLoss,
                {"shard.tfrecord", "offset 19", "cut off"});
  }
  ExpectFails(Records(TfRecordHead(~uint64_t{0}) + std::string(100, 'x')), Code::kDataLoss,
              {"offset 0", "cut off"});
  ExpectFails(Records("\x1f\x8b" + std::string(100, 'x')), Code::kInvalidArgument, {"gzip"});
}

TEST(TfRecord, LargeRecordsAreSteppedOver) {
  constexpr uint64_t kData = uint64_t{140} << 20;
  constexpr uint64_t kCount = 20;
  SparseReader reader(kCount * (kData + 16));
  for (uint64_t i = 0; i < kCount; ++i) {
    reader.Put(i * (kData + 16), TfRecordHead(kData));
    reader.Put(i * (kData + 16) + 12 + kData, Little(MaskCrc(static_cast<uint32_t>(i))));
  }
  auto index = ScanTfRecord(reader, nullptr);
  ASSERT_TRUE(index) << index.status().ToString();
  ASSERT_EQ(index->samples.size(), kCount);
  EXPECT_EQ(index->samples[7].crc, 7u);
  EXPECT_EQ(reader.reads, kCount + 1);
  EXPECT_LE(reader.bytes, ShardReader::kPiece + kCount * 16);
}

TEST(TfRecord, RecordOf4GiBIsAnError) {
  constexpr uint64_t kLimit = uint64_t{1} << 32;
  SparseReader reader(kLimit + 1000);
  reader.Put(0, TfRecordHead(kLimit));
  ExpectFails(ScanTfRecord(reader, nullptr), Code::kInvalidArgument, {"offset 0", "4 GiB"});
}

TEST(TfRecord, Names) {
  for (std::string_view name : {"a.tfrecord", "a.tfrecords", "a.tfrecord-00001-of-00002",
                                "train-00000-of-01024", "a.tfrecord-1"}) {
    EXPECT_TRUE(IsTfRecordName(name)) << name;
  }
  for (std::string_view name : {"a.tfrec", "view-of-town.jpg", "view-of-1", "1-of-", "-of-1",
                                "train-00000-of-01024.idx", "a.tar"}) {
    EXPECT_FALSE(IsTfRecordName(name)) << name;
  }
  EXPECT_TRUE(IsTarName("a.tar"));
  EXPECT_FALSE(IsTarName(".tar"));
  EXPECT_FALSE(IsTarName("a.tar.gz"));
}

TEST(Scan, CanBeCancelled) {
  const std::string records = TfRecord("one") + TfRecord("two");
  MemoryReader reader("r", Bytes(records));
  auto index = ScanTfRecord(reader, [] { return false; });
  ExpectFails(index, Code::kCancelled, {});
  const std::string tar = TarMember("a.x", "1") + TarMember("b.x", "2");
  MemoryReader tar_reader("t", Bytes(tar));
  ExpectFails(ScanTar(tar_reader, [] { return false; }), Code::kCancelled, {});
}

TEST(ShardCatalog, TarFolder) {
  TempFolder t;
  t.Write("s-1.tar", TarMember("x.jpg", "X1") + TarMember("x.cls", "3") + TarEnd());
  t.Write("s-0.tar",
          TarMember("y.jpg", "Y") + TarMember("z.txt", "text") + TarMember("z.cls", "1"));
  t.Write("index.json", "{}");
  auto catalog = BuildCatalog(t.path(), {});
  ASSERT_TRUE(catalog) << catalog.status().ToString();
  const Catalog& c = **catalog;
  EXPECT_EQ(c.format(), Format::kWebDataset);
  ASSERT_EQ(c.size(), 3u);
  EXPECT_EQ(c.object_count(), 2u);
  EXPECT_EQ(c.SampleName(0), "s-0.tar/y");
  EXPECT_EQ(c.SampleName(1), "s-0.tar/z");
  EXPECT_EQ(c.SampleName(2), "s-1.tar/x");
  EXPECT_EQ(c.ObjectPath(c.extent(2).object), t / "s-1.tar");
  EXPECT_EQ(c.label(0), -1);
  EXPECT_EQ(c.label(1), 1);
  EXPECT_EQ(c.label(2), 3);
  EXPECT_FALSE(c.extent(2).whole_object);
  const std::vector<FieldView> fields = c.Fields(2);
  ASSERT_EQ(fields.size(), 2u);
  EXPECT_EQ(fields[0].name, "jpg");
  EXPECT_EQ(fields[0].offset, 0u);
  EXPECT_EQ(fields[0].length, 2u);
  EXPECT_EQ(fields[1].name, "cls");
  EXPECT_EQ(fields[1].offset, 1024u);
  EXPECT_EQ(c.Fields(1)[0].name, "txt");

  auto one = BuildCatalog(t / "s-1.tar", {});
  ASSERT_TRUE(one) << one.status().ToString();
  EXPECT_EQ((*one)->size(), 1u);
  EXPECT_EQ((*one)->root(), t.path());
}

TEST(ShardCatalog, TfRecordFolder) {
  TempFolder t;
  t.Write("train-00001-of-00002", TfRecord("c"));
  t.Write("train-00000-of-00002", TfRecord("a") + TfRecord("bb"));
  auto catalog = BuildCatalog(t.path(), {});
  ASSERT_TRUE(catalog) << catalog.status().ToString();
  const Catalog& c = **catalog;
  EXPECT_EQ(c.format(), Format::kTfRecord);
  ASSERT_EQ(c.size(), 3u);
  EXPECT_EQ(c.SampleName(1), StrCat("train-00000-of-00002@", 17 + 12));
  EXPECT_TRUE(c.extent(1).has_crc);
  EXPECT_EQ(c.extent(1).crc, Crc32c(Bytes("bb")));
  EXPECT_EQ(c.label(1), -1);
  EXPECT_EQ(c.Fields(1)[0].name, "data");
  auto one = BuildCatalog(t / "train-00001-of-00002", {});
  ASSERT_TRUE(one);
  EXPECT_EQ((*one)->size(), 1u);
}

TEST(ShardCatalog, Errors) {
  TempFolder t;
  t.Write("a.tar", TarMember("a.jpg", "A"));
  t.Write("b.tar", TarMember("b.jpg", std::string(5000, 'B')).substr(0, 2000));
  const auto failure = [](const std::string& path, const std::string& format = "") {
    BuildOptions options;
    options.format = format;
    auto catalog = BuildCatalog(path, options);
    return catalog ? "" : catalog.error().ToString();
  };
  EXPECT_NE(failure(t.path()).find(t / "b.tar: offset 0"), std::string::npos);
  const std::string none = t.Write("none/n.tar", TarMember("README", "r"));
  EXPECT_NE(failure(none).find(none), std::string::npos);
  EXPECT_NE(failure(none).find("KEY.FIELD"), std::string::npos);
  EXPECT_NE(failure(t / "none", "tfrecord").find("*.tfrecord"), std::string::npos);
  t.Write("tf/e.tfrecord", "");
  EXPECT_NE(failure(t / "tf").find("looked for TFRecord records"), std::string::npos);
  t.Write("mixed/a.tar", TarMember("a.jpg", "A"));
  t.Write("mixed/a.tfrecord", TfRecord("A"));
  EXPECT_NE(failure(t / "mixed").find("say which"), std::string::npos);
}

// Another program appends to a shard while it is read.
class Appending final : public EarlySink {
 public:
  explicit Appending(std::string path) : path_(std::move(path)) {}
  uint64_t Room() const override { return uint64_t{1} << 30; }
  bool Land(uint32_t, uint32_t, std::span<const std::byte>) override {
    std::ofstream(path_, std::ios::binary | std::ios::app) << TarMember("late.jpg", "late");
    return true;
  }
  void Number(std::span<const SampleId>) override { ADD_FAILURE() << "the scan succeeded"; }

 private:
  const std::string path_;
};

TEST(Tar, AShardThatIsWrittenToIsNotIndexed) {
  TempFolder t;
  std::string members;
  for (int i = 0; i < 20; ++i) members += TarMember(StrCat(100 + i, ".jpg"), "bytes");
  const std::string path = t.Write("a.tar", members);
  BuildOptions options;
  ASSERT_TRUE(BuildCatalog(path, options).has_value());
  Appending appending(path);
  options.early = &appending;
  const auto built = BuildCatalog(path, options);
  ASSERT_FALSE(built.has_value());
  EXPECT_EQ(built.error().code(), Code::kChanged) << built.error().ToString();
  EXPECT_NE(built.error().message().find(path), std::string::npos);
}

}  // namespace
}  // namespace forebay
