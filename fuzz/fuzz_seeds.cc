// fuzz_seeds FOLDER: writes a few valid inputs for each fuzzer to FOLDER/<fuzzer>/.
#include <array>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "catalog/test_data.h"
#include "decode/jpeg_test_data.h"
#include "files/packet.h"
#include "peer/membership_message.h"
#include "peer/message.h"
#include "tier/folder_log.h"
#include "transport/tcp_frames.h"
#include "wire/frame.h"

namespace forebay::testing {
namespace {

void Put(const std::string& folder, std::string_view fuzzer, int number, std::string_view bytes) {
  const std::string path = StrCat(folder, "/", fuzzer);
  std::filesystem::create_directories(path);
  std::ofstream(StrCat(path, "/seed-", number), std::ios::binary) << bytes;
}

bool PutCatalog(const std::string& folder, int number, Result<std::unique_ptr<Catalog>> catalog) {
  if (!catalog) {
    std::cerr << catalog.error().ToString() << "\n";
    return false;
  }
  const std::span<const std::byte> image = (*catalog)->image();
  Put(folder, "catalog", number,
      std::string_view(reinterpret_cast<const char*>(image.data()), image.size()));
  return true;
}

// A reader that announces, asks and changes; each packet with its length before it.
void PutQuestions(const std::string& folder) {
  using files::Kind;
  const std::vector<std::string_view> paths = {"/d/a", "/d/b", "/d/c/e"};
  std::string input;
  const auto add = [&](const std::vector<std::byte>& packet) {
    input += '\1';
    input += static_cast<char>(packet.size());
    input.append(reinterpret_cast<const char*>(packet.data()), packet.size());
    input += "\xff\x80\x01";  // time passes, a job ends
  };
  const std::vector<uint32_t> order = {2, 1, 0, 1};
  add(files::PathsPacket(Kind::kNames, paths));
  add(files::OrderPacket(0, order));
  for (const std::string_view path : paths) {
    add(files::PathsPacket(Kind::kGet, {&path, 1}));
    add(files::PathsPacket(Kind::kRange, {&path, 1}, 0, 1 << 20));
    add(files::PathsPacket(Kind::kDirect, {&path, 1}, 1, 2));
  }
  add(files::PathsPacket(Kind::kAt, {}, 2));
  add(files::PathsPacket(Kind::kChanged, {&paths[1], 1}));
  Put(folder, "files", 0, input);
}

// A member that says who it is, registers, suspects another and leaves.
void PutMemberFrames(const std::string& folder) {
  using namespace peer::frame;
  const peer::Member one{1, 5, "10.0.0.1:7711", 1 << 20, 0, true};
  const peer::Member two{2, 6, "10.0.0.2:7711", 1 << 20, 1 << 30, false};
  const std::vector<Frame> frames = {
      Hello{kProtocol, 1, 5, {}},  Answer{0, 1, 3, {}, {}}, ProofOf{},
      Register{8, one, 4, {two}},  Changes{5, {one, two}},  Beat{},
      Suspicion{2, 6, "silent"},   Refused{true, "no"},     Leave{},
      Redirect{2, "10.0.0.2:7712"}};
  std::string all;
  for (size_t i = 0; i < frames.size(); ++i) {
    std::string bytes;
    Append(frames[i], &bytes);
    Put(folder, "members", static_cast<int>(i), bytes);
    all += bytes;
  }
  Put(folder, "members", static_cast<int>(frames.size()), all);
}

// A member's connection: a hello, a short message, one with a payload.
void PutTcpStreams(const std::string& folder) {
  tcp::FrameWriter writer;
  const std::vector<std::byte> header(40, std::byte{1}), payload(3000, std::byte{2});
  writer.AddHello(tcp::Role::kConnected);
  writer.Add(header, {}, 0);
  writer.Add(header, payload, 1);
  writer.Add({}, std::span(payload).first(10), 2);
  std::array<iovec, 16> pieces;
  std::string stream;
  for (const iovec& piece : std::span(pieces).first(writer.Fill(pieces))) {
    stream.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
  }
  Put(folder, "tcp", 0, std::string("\0\0", 2) + stream);
  Put(folder, "tcp", 1, std::string("\0\3\0\20\377", 5) + stream);
  Put(folder, "tcp", 2, std::string("\3\1\40", 3) + stream);
}

void PutPeerMessages(const std::string& folder) {
  peer::GetMessage get;
  get.wanted = {{1, 2}, {3, 4}};
  peer::DataMessage data;
  data.given = {{1, 100, 7}, {3, 200, 8}};
  peer::HaveMessage have;
  have.bits.assign(9, std::byte{0x5a});
  peer::ChangesMessage changes;
  changes.got = {1, 2, 3};
  changes.lost = {4};
  const peer::GetNamedMessage named{
      .dataset = 1,
      .urgent = 1,
      .wanted = {{.request = 1, .sample = {"class/7.jpg", 110000, 1'700'000'000'000'000'005, 0, 0}},
                 {.request = 2, .sample = {"large.bin", 3 << 20, 5, 1 << 20, 2 << 20}}}};
  const std::vector<peer::Message> messages = {peer::HelloMessage(),
                                               peer::AnswerMessage(),
                                               peer::ProofMessage(),
                                               peer::DatasetMessage(),
                                               peer::RefusedMessage(),
                                               peer::CancelMessage(),
                                               peer::PingMessage(),
                                               peer::PlanMessage(),
                                               get,
                                               data,
                                               have,
                                               changes,
                                               named};
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::vector<std::byte> bytes = peer::Encode(messages[i]);
    Put(folder, "peer", static_cast<int>(i),
        std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
}

// One frame of each message that has a list, and a plain one; the first byte cuts the input.
void PutMessages(const std::string& folder) {
  wire::Loan loan;
  loan.samples = {1, 2};
  loan.offsets = {0, 4096};
  loan.lengths = {10, 20};
  wire::Declare declare;
  declare.order = {3, 2, 1};
  wire::Release release;
  release.leases = {1, 2};
  wire::StatsReply stats;
  stats.epochs = stats.reads = stats.bytes = stats.peer_reads = stats.peer_bytes = {1, 2};
  wire::SetKnobs knobs;
  knobs.names = {"a", "bc"};
  knobs.values = {1, -2};
  wire::OpenDataset dataset;
  dataset.delay = "open_ms=1";
  wire::SetPolicy policy;
  policy.json = "{\"version\":1}";
  std::vector<std::byte> bytes = {std::byte{40}};
  wire::EncodeStatus(Status(Code::kNotFound, "gone"), 1, &bytes);
  const bool ok =
      wire::Encode(wire::Hello(), 1, &bytes).ok() &&
      wire::Encode(wire::OpenStream(), 2, &bytes).ok() && wire::Encode(declare, 3, &bytes).ok() &&
      wire::Encode(loan, 4, &bytes).ok() && wire::Encode(release, 5, &bytes).ok() &&
      wire::Encode(stats, 6, &bytes).ok() && wire::Encode(knobs, 7, &bytes).ok() &&
      wire::Encode(dataset, 8, &bytes).ok() && wire::Encode(wire::Query(), 9, &bytes).ok() &&
      wire::Encode(policy, 10, &bytes).ok() && wire::Encode(wire::Lend(), 11, &bytes).ok() &&
      wire::Encode(wire::Nudge(), 0, &bytes).ok() &&
      wire::Encode(wire::Stalled(), 0, &bytes).ok() &&
      wire::Encode(wire::CloseDataset(), 0, &bytes).ok() &&
      wire::Encode(wire::AskLook(), 0, &bytes).ok() &&
      wire::Encode(wire::HandInLook(), 0, &bytes).ok();
  if (ok) {
    Put(folder, "wire", 0,
        std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
}

void PutJpegs(const std::string& folder) {
  std::vector<std::vector<uint8_t>> files = {SmallFile()};
#ifdef FOREBAY_HAVE_JPEG
  std::mt19937 random(1);
  JpegOptions options;
  options.width = 35;
  options.height = 21;
  options.quality = 60;
  options.picture = Picture::kSmooth;
  files.push_back(Encode(options, random));
  options.factors = {2, 2, 1, 1, 1, 1, 1, 1};
  options.restart = 2;
  files.push_back(Encode(options, random));
  options.optimize = true;
  options.progressive = true;
  files.push_back(Encode(options, random));
  options.space = JCS_YCCK;
  files.push_back(Encode(options, random));
  options.progressive = false;
  options.separate = true;
  files.push_back(Encode(options, random));
  options.space = JCS_GRAYSCALE;
  options.separate = false;
  options.picture = Picture::kNoise;
  files.push_back(Encode(options, random));
#endif
  for (size_t i = 0; i < files.size(); ++i) {
    Put(folder, "jpeg", static_cast<int>(i),
        std::string_view(reinterpret_cast<const char*>(files[i].data()), files[i].size()));
  }
}

void PutPolicies(const std::string& folder) {
  PutQuestions(folder);
  Put(folder, "policy", 0,
      R"({"job":[{"folder":0,"match":"a*","max_bandwidth":1e9,"max_operations":5000,"memory":8,)"
      R"("min_bandwidth":2.5,"min_operations":10,"priority":-2,"share":3},{"match":"*"}],)"
      R"("tiers":{"folder":7,"memory":9},"tuner":{"knobs":{"k":32},"on":false},"version":1})");
  Put(folder, "policy", 1, R"([1,-2.5e-3,"\u00e9\ud83d\ude00\n",true,false,null,{"a":[]}])");
}

// Small ones of each kind: PNG (interlaced or not), lossless WebP, an array of 2 x 3 floats.
void PutImagesAndArrays(const std::string& folder) {
  Put(folder, "images", 0,
      std::string("\211\120\116\107\015\012\032\012\000\000\000\015\111\110\104\122\000\000\000\011"
                  "\000\000\000\007\001\000\000\000\001\205\347\152\133\000\000\000\013\111\104\101"
                  "\124\170\332\143\140\300\013\000\000\037\000\001\023\131\064\075\000\000\000\000"
                  "\111\105\116\104\256\102\140\202",
                  68));
  Put(folder, "images", 1,
      std::string("\211\120\116\107\015\012\032\012\000\000\000\015\111\110\104\122\000\000\000\011"
                  "\000\000\000\007\001\000\000\000\000\362\340\132\315\000\000\000\013\111\104\101"
                  "\124\170\332\143\140\300\002\000\000\025\000\001\071\301\340\043\000\000\000\000"
                  "\111\105\116\104\256\102\140\202",
                  68));
  Put(folder, "images", 2,
      std::string("\122\111\106\106\024\000\000\000\127\105\102\120\126\120\070\114\010\000\000\000"
                  "\057\035\300\004\000\210\210\010",
                  28));
  Put(folder, "npy", 0,
      std::string("\223\116\125\115\120\131\001\000\074\000\173\047\144\145\163\143\162\047\072\040"
                  "\047\074\146\064\047\054\040\047\146\157\162\164\162\141\156\137\157\162\144\145"
                  "\162\047\072\040\106\141\154\163\145\054\040\047\163\150\141\160\145\047\072\040"
                  "\050\062\054\040\063\051\054\040\175\012\000\000\000\000\000\000\000\000\000\000"
                  "\000\000\000\000\000\000\000\000\000\000\000\000\000\000",
                  94));
}

// As etcd answers, after "how many cuts, where"; and as a browser asks, after "\x80".
void PutHttp(const std::string& folder) {
  const std::string cuts("\2\3\40", 3);
  Put(folder, "http", 0, cuts + "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
  Put(folder, "http", 1,
      cuts +
          "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n"
          "0\r\nTrailer: z\r\n\r\n");
  Put(folder, "http", 2,
      cuts + "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 No\r\nConnection: close\r\n\r\nrest");
  Put(folder, "http", 3,
      std::string("\x80") + "GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9095\r\nX: y\r\n");
  Put(folder, "http", 4, std::string("\x80") + "HEAD / HTTP/1.0\r\nHost: evil.example\r\n");
}

// Two copies, a drop, a group that is used, its path, what a segment lost, and a forgotten group;
// once as the file is, and as records without their checksums.
void PutFolderLogs(const std::string& folder) {
  LogRecord packed;
  packed.name = 1;
  packed.group = 1;
  packed.length = 100;
  packed.offset = 8;
  packed.kind = LogRecord::Kind::kPacked;
  LogRecord file = packed;
  file.name = 13;
  file.length = 13 * 8;
  file.offset = 0;
  file.kind = LogRecord::Kind::kFile;
  LogRecord drop = packed;
  drop.kind = LogRecord::Kind::kDrop;
  LogRecord forget;
  forget.group = 1;
  forget.kind = LogRecord::Kind::kForget;
  std::vector<LogRecord> records = {LimitRecord(1 << 30),
                                    UseRecord(1, 1'700'000'000),
                                    PathRecords(1, "/data/set").front(),
                                    packed,
                                    file,
                                    LostRecord(1, 0, 96),
                                    drop,
                                    packed,
                                    forget,
                                    file};
  std::string input;
  for (const LogRecord& record : records) {
    input.append(reinterpret_cast<const char*>(&record), offsetof(LogRecord, check));
    input += '\0';
  }
  for (const char flags : {'\0', '\4', '\10', '\16'})
    Put(folder, "folder_log", flags, flags + input);
  const TempFolder temp;
  const OwnedFd at(open(temp.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto log = FolderLog::Create(at.get(), [&](const FolderLog::Emit& emit) {
    for (const LogRecord& record : records) emit(record);
  });
  std::ifstream made(temp / FolderLog::kName, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(made), {}};
  Put(folder, "folder_log", 1, '\1' + bytes);
  Put(folder, "folder_log", 3, '\3' + bytes);
}

int Main(const std::string& folder) {
  PutHttp(folder);
  PutFolderLogs(folder);
  PutImagesAndArrays(folder);
  PutPolicies(folder);
  PutJpegs(folder);
  PutMessages(folder);
  PutPeerMessages(folder);
  PutTcpStreams(folder);
  PutMemberFrames(folder);
  const std::string long_name = std::string(120, 'n') + ".jpg";
  const std::string tar = TarMember("d/", "", '5') + TarMember("a.jpg", "picture") +
                          TarMember("a.cls", "7") + TarMember("././@LongLink", long_name, 'L') +
                          TarMember("short", "long") +
                          TarMember("p", PaxRecord("path", "p.jpg") + PaxRecord("size", "3"), 'x') +
                          TarMember("q", "pax") + TarMember("b.jpg", "") + TarEnd();
  const std::string records = TfRecord("one") + TfRecord("") + TfRecord(std::string(100, 'x'));
  Put(folder, "tar", 0, tar);
  Put(folder, "tar", 1, TarMember("a.x", "1") + TarMember("a.cls", "1"));
  Put(folder, "tfrecord", 0, records);
  Put(folder, "tfrecord", 1, TfRecord(""));
  Put(folder, "folder", 0, std::string("\0\0\0\0\0\0\1\3\1\5\3\2\6\6\0\3\3\1\7", 19));
  Put(folder, "folder", 1, std::string("\1\3\0\5\3\0\7\7\0\6", 10));

  TempFolder data;
  data.Write("tree/a/1.jpg", "1");
  data.Write("tree/a/b/2.jpg", "2");
  data.Write("tree/c/3.jpg", "");
  data.Write("tar/0.tar", tar);
  data.Write("records/0.tfrecord", records);
  const std::vector<std::string> list = {data / "tree/a/1.jpg", data / "tar/0.tar"};
  const bool ok = PutCatalog(folder, 0, BuildCatalog(data / "tree", {})) &&
                  PutCatalog(folder, 1, BuildCatalog(data / "tar", {})) &&
                  PutCatalog(folder, 2, BuildCatalog(data / "records", {})) &&
                  PutCatalog(folder, 3, BuildFileList(list, {}));
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace forebay::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: fuzz_seeds FOLDER\n";
    return 2;
  }
  return forebay::testing::Main(argv[1]);
}
