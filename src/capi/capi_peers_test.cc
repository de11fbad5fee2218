// Peers through the C interface: two processes that know each other by a list.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/owned.h"
#include "base/rng.h"
#include "forebay/forebay.h"

namespace forebay {
namespace {

namespace fs = std::filesystem;

constexpr size_t kSamples = 120;
constexpr uint32_t kNodes = 2;
constexpr uint64_t kEpochs = 2;
constexpr int kWaitMs = 60'000;

std::string NameOf(size_t i) { return std::to_string(10'000 + i) + ".bin"; }

std::string ContentOf(const std::string& name) {
  SplitMix64 rng(std::hash<std::string>()(name));
  std::string out(rng.Below(40'000), '\0');
  for (char& c : out) c = static_cast<char>(rng.Next());
  return out;
}

// A thread of this process, other than the calling one, that does not block what the program may
// use for itself; empty: there is none.
std::string TakesSignals() {
  for (const auto& task : fs::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(gettid())) continue;
    std::ifstream status(task.path() / "status");
    std::string word, name;
    uint64_t blocked = ~uint64_t{0};  // of one that has just ended
    while (status >> word) {
      if (word == "Name:") status >> name;
      if (word == "SigBlk:") status >> std::hex >> blocked;
    }
    for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD, SIGPROF}) {
      if ((blocked >> (number - 1) & 1) == 0) return name;
    }
  }
  return "";
}

// One node of the job, in a process of its own. What it says goes to the parent, line by line.
class NodeProcess {
 public:
  NodeProcess(uint32_t node, std::string peers, std::string root)
      : node_(node), peers_(std::move(peers)), root_(std::move(root)) {}
  ~NodeProcess() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  NodeProcess(const NodeProcess&) = delete;
  NodeProcess& operator=(const NodeProcess&) = delete;

  void Start() {
    std::array<int, 2> said{}, told{};
    ASSERT_EQ(pipe2(said.data(), O_CLOEXEC), 0);
    ASSERT_EQ(pipe2(told.data(), O_CLOEXEC), 0);
    said_ = OwnedFd(said[0]);
    told_ = OwnedFd(told[1]);
    OwnedFd say(said[1]), hear(told[0]);
    pid_ = fork();
    ASSERT_GE(pid_, 0);
    if (pid_ != 0) return;
    said_.Reset();
    told_.Reset();  // an end of the parent ends it
    const auto tell = [&](const std::string& text) {
      (void)!write(say.get(), (text + "\n").data(), text.size() + 1);
      char ignored = 0;
      (void)!read(hear.get(), &ignored, 1);  // the other may still need this node
    };
    tell(Run());
    if (engine_ != nullptr) tell(Counts());
    fb_loader_close(loader_);
    fb_dataset_close(dataset_);
    fb_engine_close(engine_);
    _exit(0);
  }

  // What it says next, see Run and Counts. It goes on after GoOn.
  std::string Says() {
    std::string text;
    const Nanos until = SteadyClock().Now() + kWaitMs * kMilli;
    while (text.empty() || text.back() != '\n') {
      pollfd waiting = {.fd = said_.get(), .events = POLLIN, .revents = 0};
      const Nanos left = until - SteadyClock().Now();
      std::array<char, 512> part;
      if (left <= 0 || poll(&waiting, 1, static_cast<int>(left / kMilli) + 1) != 1) {
        return "error it says nothing";
      }
      const ssize_t got = read(said_.get(), part.data(), part.size());
      if (got <= 0) return "error it is gone: " + text;
      text.append(part.data(), static_cast<size_t>(got));
    }
    text.pop_back();
    return text;
  }

  void GoOn() { (void)!write(told_.get(), "g", 1); }

  // As waitpid tells.
  int End() {
    GoOn();
    int status = -1;
    waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }

 private:
  // Two epochs of its rank: "ok" or "error WHY".
  std::string Run() {
    setenv("FOREBAY_NODE", std::to_string(node_).c_str(), 1);
    setenv("FOREBAY_PEER_SECRET", (root_ + "/secret").c_str(), 1);
    setenv("FOREBAY_PEER_LISTEN", "127.0.0.1", 1);
    setenv("FOREBAY_CACHE_DIR", (root_ + "/cache" + std::to_string(node_)).c_str(), 1);
    for (const char* wait : {"FOREBAY_PEER_WAIT", "FOREBAY_PEER_JOIN_WAIT", "FOREBAY_PEER_LEASE"}) {
      setenv(wait, "20", 1);
    }

    fb_engine_options engine_options;
    fb_engine_options_init(&engine_options, sizeof engine_options);
    engine_options.memory = 64 << 20;
    engine_options.peers = peers_.c_str();
    if (fb_engine_open(&engine_options, &engine_) != 0) return Failed("engine");
    if (fb_dataset_open(engine_, (root_ + "/data").c_str(), nullptr, &dataset_) != 0) {
      return Failed("data set");
    }
    fb_loader_options options;
    fb_loader_options_init(&options, sizeof options);
    options.batch_size = 8;
    options.rank = node_;
    options.world = kNodes;
    options.seed = 5;
    options.epochs = kEpochs;
    if (fb_loader_open(dataset_, &options, &loader_) != 0) return Failed("loader");
    std::multiset<int64_t> seen;
    while (true) {
      fb_batch* batch = nullptr;
      const int rc = fb_loader_next(loader_, kWaitMs, &batch);
      if (rc < 0) return Failed("next");
      if (rc == FB_END_OF_STREAM) break;
      if (rc != FB_BATCH) continue;
      for (size_t i = 0; i < static_cast<size_t>(fb_batch_size(batch)); ++i) {
        const void* bytes = nullptr;
        size_t length = 0;
        if (fb_batch_data(batch, i, &bytes, &length) != 0) return Failed("data");
        const int64_t sample = fb_batch_sample(batch, i);
        const std::string right = ContentOf(NameOf(static_cast<size_t>(sample)));
        if (length != right.size() || std::memcmp(bytes, right.data(), length) != 0) {
          return "error wrong bytes of sample " + std::to_string(sample);
        }
        seen.insert(sample);
      }
      if (fb_batch_release(batch) != 0) return Failed("release");
    }
    if (seen.size() != kEpochs * kSamples / kNodes) {
      return "error it got " + std::to_string(seen.size()) + " samples";
    }
    if (const std::string taker = TakesSignals(); !taker.empty()) {
      return "error the thread " + taker + " takes signals";
    }
    return "ok";
  }

  // Samples that it has read from the source, and from the other, then asks that a busy machine
  // made fail.
  std::string Counts() const {
    std::string text(static_cast<size_t>(fb_metrics_text(engine_, nullptr, 0)) + 1000, '\0');
    text.resize(static_cast<size_t>(fb_metrics_text(engine_, text.data(), text.size())));
    std::string counts;
    for (const char* name : {"source_reads", "peer_reads", "peer_timeouts", "peer_refused",
                             "peer_avoided", "source_hedged_reads"}) {
      const std::string line = std::string("\nforebay_") + name + "_total ";
      const size_t at = text.find(line);
      if (at == std::string::npos) return std::string("no metric ") + name;
      counts += text.substr(at + line.size(), text.find('\n', at + 1) - at - line.size()) + " ";
    }
    return counts;
  }

  static std::string Failed(const std::string& what) {
    return "error " + what + ": " + fb_last_error();
  }

  const uint32_t node_;
  const std::string peers_;
  const std::string root_;
  pid_t pid_ = 0;
  OwnedFd said_;
  OwnedFd told_;
  // Of the process itself.
  fb_engine* engine_ = nullptr;
  fb_dataset* dataset_ = nullptr;
  fb_loader* loader_ = nullptr;
};

// Ports that nobody has a moment before.
std::string FreePlaces(uint32_t n) {
  std::vector<OwnedFd> held;
  std::string list;
  for (uint32_t i = 0; i < n; ++i) {
    held.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(held.back().get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(held.back().get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    list += (i == 0 ? "127.0.0.1:" : ",127.0.0.1:") + std::to_string(ntohs(address.sin_port));
  }
  return list;
}

TEST(CapiPeers, AListThatDoesNotSayWhichNodeThisIsIsRefused) {
  unsetenv("FOREBAY_NODE");
  fb_engine_options options;
  ASSERT_EQ(fb_engine_options_init(&options, sizeof options), 0);
  options.memory = 32 << 20;
  options.peers = "127.0.0.1:7001,127.0.0.1:7002";
  fb_engine* engine = nullptr;
  EXPECT_EQ(fb_engine_open(&options, &engine), -EINVAL);
  EXPECT_EQ(engine, nullptr);
  EXPECT_NE(std::string(fb_last_error()).find("FOREBAY_NODE"), std::string::npos)
      << fb_last_error();
  options.peers = "off";
  EXPECT_EQ(fb_engine_open(&options, &engine), 0) << fb_last_error();
  fb_engine_close(engine);
}

TEST(CapiPeers, TwoProcessesReadEachSampleOnceForBoth) {
  std::string root = (fs::temp_directory_path() / "forebay_capi_peers_XXXXXX").string();
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  fs::create_directories(root + "/data");
  for (size_t i = 0; i < kSamples; ++i) {
    std::ofstream(root + "/data/" + NameOf(i), std::ios::binary) << ContentOf(NameOf(i));
  }
  const std::string peers = FreePlaces(kNodes);
  NodeProcess zero(0, peers, root), one(1, peers, root);
  const std::array<NodeProcess*, kNodes> nodes = {&zero, &one};
  for (NodeProcess* node : nodes) node->Start();
  for (NodeProcess* node : nodes) EXPECT_EQ(node->Says(), "ok");
  // What one asks the other for counts until both are done.
  uint64_t reads = 0, failed = 0;
  for (NodeProcess* node : nodes) {
    node->GoOn();
    const std::string counts = node->Says();
    std::istringstream numbers(counts);
    uint64_t own = 0, from_peer = 0, more = 0;
    numbers >> own >> from_peer;
    EXPECT_GT(own, kSamples / 8) << counts;
    EXPECT_GT(from_peer, kSamples / 8) << counts;
    reads += own;
    while (numbers >> more) failed += more;
  }
  for (NodeProcess* node : nodes) EXPECT_EQ(node->End(), 0);
  fs::remove_all(root);
  EXPECT_GE(reads, kSamples);
  EXPECT_LE(reads, kSamples + failed);
}

}  // namespace
}  // namespace forebay
