#include "daemon/control_loop.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/json.h"
#include "control/etcd_process.h"
#include "control/kept_policy.h"
#include "daemon/test_files.h"

namespace forebay {
namespace {

using control::JsonValue;
using testing::MakeEngine;
using testing::SlowSource;
using testing::TestFiles;

// Gone with the object.
struct StateFolder {
  StateFolder() { (void)mkdtemp(path.data()); }
  ~StateFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  StateFolder(const StateFolder&) = delete;
  StateFolder& operator=(const StateFolder&) = delete;
  std::string path = std::filesystem::temp_directory_path() / "forebay-state-XXXXXX";
};

// Two jobs that take batches as fast as they come, from a source that 16 reads at once saturate.
class ControlLoopTest : public ::testing::Test {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.memory = 10 << 20;
    options.max_in_flight = 16;
    options.keep = false;
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine);
    engine_ = *std::move(engine);
    for (const uint32_t n : {300, 301}) {
      auto catalog = files_.Make(n, 10'000, 10'000);
      const auto added = engine_->AddDataset(catalog, SlowSource(5 * kMilli));
      ASSERT_TRUE(added);
      StreamOptions stream;
      stream.shape.dataset = *added;
      stream.shape.batch_size = 4;
      stream.shape.job = n == 300 ? "a" : "b";
      stream.sampler.size = n;
      const auto opened = engine_->OpenStream(stream);
      ASSERT_TRUE(opened);
      streams_.push_back(*opened);
    }
    for (const StreamId id : streams_) {
      consumers_.emplace_back([this, id](std::stop_token stop) {
        while (!stop.stop_requested()) {
          BatchLoan loan;
          const auto kind = engine_->Take(id, 50 * kMilli, &loan);
          if (kind && *kind == TakeKind::kBatch) (void)engine_->Release(loan.lease);
        }
      });
    }
  }
  void TearDown() override {
    consumers_.clear();
    loop_.reset();
    engine_.reset();
  }

  void Start(std::vector<std::string> etcd = {}) {
    ControlLoopOptions options;
    options.etcd = std::move(etcd);
    options.node = "node";
    options.policy_file = policy_file_;
    options.say = [this](std::string_view what) {
      MutexLock lock(said_mutex_);
      said_.emplace_back(what);
    };
    auto loop = ControlLoop::Start(*engine_, options);
    ASSERT_TRUE(loop) << loop.status().ToString();
    loop_ = *std::move(loop);
  }

  static double Number(const JsonValue* value) {
    return value == nullptr ? -1 : value->number().value_or(-1);
  }
  // A job's limit in bytes a second; -1: none.
  double Limit(std::string_view job) const {
    const auto said = JsonValue::Parse(loop_->Describe());
    EXPECT_TRUE(said) << loop_->Describe();
    for (const JsonValue& each : *said->Find("jobs")->array()) {
      if (*each.Find("job")->text() == job) return Number(each.Find("limit_bytes_per_s"));
    }
    return -1;
  }
  std::string State() const {
    const auto said = JsonValue::Parse(loop_->Describe());
    return *said->Find("state")->text();
  }
  template <typename Done>
  static bool Await(Done done) {
    const Nanos until = SteadyClock().Now() + 15 * kSecond;
    while (!done() && SteadyClock().Now() < until) usleep(10'000);
    return done();
  }

  TestFiles files_;
  EnginePtr engine_;
  std::vector<StreamId> streams_;
  std::unique_ptr<ControlLoop> loop_;
  std::vector<std::jthread> consumers_;
  std::string policy_file_;
  Mutex said_mutex_;
  std::vector<std::string> said_ GUARDED_BY(said_mutex_);
};

TEST_F(ControlLoopTest, APolicyBecomesLimitsAndKnobs) {
  Start();
  EXPECT_EQ(loop_->policy(), "");
  ASSERT_TRUE(loop_
                  ->SetPolicy(R"({"version":1,"job":[{"match":"a","share":3,"memory":0},
        {"match":"b"}],"tiers":{"memory":4096},
        "tuner":{"on":true,"knobs":{"source_reads_in_flight":7}}})")
                  .ok());
  EXPECT_NE(loop_->policy().find("\"share\":3"), std::string::npos);
  EXPECT_TRUE(Await([&] {
    const double a = Limit("a");
    const double b = Limit("b");
    return a > 0 && b > 0 && a / b > 2.9 && a / b < 3.1;
  })) << loop_->Describe();
  const auto knob = [&](std::string_view name) {
    for (const Knob* each : engine_->registry().Knobs()) {
      if (each->name() == name) return each->value();
    }
    return int64_t{-1};
  };
  EXPECT_TRUE(Await([&] { return knob("source_reads_in_flight") == 7; }));
  EXPECT_EQ(knob("memory_tier_bytes"), 4096);
  // What a policy no longer names is as it was; a wrong one changes nothing.
  EXPECT_EQ(loop_->SetPolicy(R"({"version":1,"tuner":{"on":true,"knobs":{"nonsense":7}}})").code(),
            Code::kInvalidArgument);
  EXPECT_NE(loop_->policy().find("\"share\":3"), std::string::npos);
  ASSERT_TRUE(loop_->SetPolicy("").ok());
  EXPECT_TRUE(Await([&] { return knob("source_reads_in_flight") == 0; }));
  EXPECT_EQ(knob("memory_tier_bytes"), 0);
  EXPECT_EQ(loop_->policy(), "");
}

TEST_F(ControlLoopTest, APolicyIsKeptForTheNextOne) {
  const StateFolder folder;
  policy_file_ = folder.path + "/state/forebay/policy.json";
  const auto kept = [&] { return *control::ReadKeptPolicy(policy_file_); };
  const auto said = [&] {
    MutexLock lock(said_mutex_);
    return said_.empty() ? std::string() : said_.back();
  };
  Start();
  EXPECT_EQ(loop_->policy(), "");
  ASSERT_TRUE(
      loop_->SetPolicy(R"({"version":1,"job":[{"match":"a","share":3},{"match":"b"}]})").ok());
  ASSERT_TRUE(Await([&] { return kept() == loop_->policy(); }));
  ASSERT_TRUE(Await([&] { return loop_->Describe().find(policy_file_) != std::string::npos; }));
  const std::string policy = loop_->policy();
  EXPECT_NE(policy.find("\"share\":3"), std::string::npos);
  loop_.reset();
  Start();
  EXPECT_EQ(loop_->policy(), policy);
  EXPECT_NE(loop_->Describe().find(policy_file_), std::string::npos);
  EXPECT_TRUE(Await([&] {
    const double a = Limit("a");
    const double b = Limit("b");
    return a > 0 && b > 0 && a / b > 2;
  })) << loop_->Describe();
  // Also what was set last of all.
  ASSERT_TRUE(loop_->SetPolicy(R"({"version":1,"job":[{"match":"a","share":7}]})").ok());
  loop_.reset();
  EXPECT_NE(kept().find("\"share\":7"), std::string::npos);
  // What is no policy of this daemon's is not in force, stays where it is, and is told.
  ASSERT_TRUE(control::KeepPolicy(policy_file_,
                                  R"({"version":1,"tuner":{"on":true,"knobs":{"nonsense":7}}})")
                  .ok());
  Start();
  EXPECT_EQ(loop_->policy(), "");
  EXPECT_NE(said().find("nonsense"), std::string::npos) << said();
  EXPECT_NE(loop_->Describe().find("forebay policy remove"), std::string::npos);
  EXPECT_NE(kept(), "");
  ASSERT_TRUE(loop_->SetPolicy("").ok());
  EXPECT_TRUE(Await([&] { return kept().empty(); }));
  loop_.reset();
  // What others may have written is not believed.
  ASSERT_TRUE(control::KeepPolicy(policy_file_, policy).ok());
  ASSERT_EQ(chmod(policy_file_.c_str(), 0666), 0);
  Start();
  EXPECT_EQ(loop_->policy(), "");
  EXPECT_NE(said().find("remove it"), std::string::npos) << said();
}

TEST_F(ControlLoopTest, APolicyThatCannotBeKeptIsInForce) {
  const StateFolder folder;
  const std::string state = folder.path + "/state";
  ASSERT_EQ(mkdir(state.c_str(), 0777), 0);
  ASSERT_EQ(chmod(state.c_str(), 0777), 0);
  policy_file_ = state + "/policy.json";
  Start();
  ASSERT_TRUE(loop_->SetPolicy(R"({"version":1,"job":[{"match":"a","share":3}]})").ok());
  EXPECT_NE(loop_->policy(), "");
  EXPECT_TRUE(Await([&] { return loop_->Describe().find("state folder") != std::string::npos; }))
      << loop_->Describe();
  EXPECT_NE(loop_->policy(), "");
  EXPECT_NE(access(policy_file_.c_str(), F_OK), 0);
}

TEST_F(ControlLoopTest, AJobThatIsAloneHasNoLimit) {
  Start();
  ASSERT_TRUE(Await([&] { return Limit("a") > 0 && Limit("b") > 0; })) << loop_->Describe();
  ASSERT_TRUE(engine_->CloseStream(streams_[0]).ok());
  EXPECT_TRUE(Await([&] { return Limit("b") < 0; })) << loop_->Describe();
}

TEST_F(ControlLoopTest, WithoutEtcdTheLastLimitsStay) {
  if (!control::testing::EtcdProcess::Installed()) GTEST_SKIP() << "no etcd";
  auto etcd = control::testing::EtcdProcess::Start();
  ASSERT_NE(etcd, nullptr);
  Start({etcd->endpoint()});
  EXPECT_EQ(loop_->SetPolicy("{\"version\":1}").code(), Code::kUnimplemented);
  ASSERT_TRUE(Await([&] { return Limit("a") > 0 && Limit("b") > 0; })) << loop_->Describe();
  etcd->Kill();
  ASSERT_TRUE(Await([&] { return State() == "no store"; })) << loop_->Describe();
  const double before = Limit("a");
  EXPECT_GT(before, 0);
  // One line, and one more for each time that a busy machine was too slow before.
  const auto said = [&] {
    MutexLock lock(said_mutex_);
    return said_.size();
  };
  EXPECT_TRUE(Await([&] { return said() > 0; }));
  const size_t lines = said();
  usleep(600'000);  // two rounds
  EXPECT_EQ(Limit("a"), before);
  EXPECT_EQ(said(), lines);  // once, not every round
  EXPECT_NE(loop_->Describe().find("the limits of the last decision hold"), std::string::npos);
  etcd->Launch();
  EXPECT_TRUE(Await([&] { return State() == "following"; })) << loop_->Describe();
}

}  // namespace
}  // namespace forebay
