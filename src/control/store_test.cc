// One suite that every store passes, and what only one of them can do.
#include "control/store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "control/etcd_process.h"
#include "control/etcd_store.h"
#include "control/memory_store.h"
#include "transport/transport.h"

namespace forebay::control {
namespace {

using testing::EtcdProcess;

// What a conformance test needs of a store beyond its interface: handles, and time that passes.
class Fixture {
 public:
  virtual ~Fixture() = default;
  virtual Status Ready() { return Status(); }
  virtual std::unique_ptr<ControlStore> Handle() = 0;
  virtual void Pass(Nanos time) = 0;
};

class MemoryFixture final : public Fixture {
 public:
  std::unique_ptr<ControlStore> Handle() override { return std::make_unique<MemoryStore>(state_); }
  void Pass(Nanos time) override { clock_.Advance(time); }

 private:
  ManualClock clock_;
  MemoryStoreState state_{clock_};
};

// `secured`: by TLS, with certificates of both sides and a user.
class EtcdFixture final : public Fixture {
 public:
  explicit EtcdFixture(bool secured) : secured_(secured) {}
  Status Ready() override {
    if (secured_) certificates_ = std::make_unique<testing::Certificates>();
    etcd_ = secured_ ? EtcdProcess::StartTls(*certificates_, true) : EtcdProcess::Start();
    if (etcd_ == nullptr) return Status(Code::kUnavailable, "etcd does not start");
    if (secured_ && !etcd_->SetUsers()) return Status(Code::kUnavailable, "etcd takes no users");
    return Status();
  }
  std::unique_ptr<ControlStore> Handle() override {
    return *EtcdStore::Make(etcd_->options(20 * kSecond));  // the machine may be busy
  }
  void Pass(Nanos time) override { std::this_thread::sleep_for(std::chrono::nanoseconds(time)); }

 private:
  const bool secured_;
  std::unique_ptr<testing::Certificates> certificates_;
  std::unique_ptr<EtcdProcess> etcd_;
};

class StoreTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) != "memory") {
      if (!EtcdProcess::Installed()) {
        GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
      }
      const bool secured = std::string(GetParam()) == "etcd_secured";
      if (secured && !TlsVersion()) GTEST_SKIP() << TlsVersion().error().message();
      fixture_ = std::make_unique<EtcdFixture>(secured);
    } else {
      fixture_ = std::make_unique<MemoryFixture>();
    }
    const Status ready = fixture_->Ready();
    ASSERT_TRUE(ready.ok()) << ready.message();
    store_ = fixture_->Handle();
  }

  std::vector<std::string> Keys(std::string_view prefix) {
    std::vector<std::string> keys;
    const auto snapshot = store_->Range(prefix);
    EXPECT_TRUE(snapshot) << snapshot.status().message();
    if (snapshot) {
      for (const StoreEntry& entry : snapshot->entries) keys.push_back(entry.key);
    }
    return keys;
  }
  // Until `done`, with time passing; false after `most`.
  template <typename Done>
  bool Within(Nanos most, Done done) {
    for (Nanos passed = 0; passed <= most; passed += 100 * kMilli) {
      if (done()) return true;
      fixture_->Pass(100 * kMilli);
    }
    return false;
  }
  std::vector<StoreEvent> Events(StoreWatch& watch, size_t count) {
    std::vector<StoreEvent> all;
    for (int i = 0; i < 200 && all.size() < count; ++i) {
      auto some = watch.Poll(50 * kMilli);
      EXPECT_TRUE(some) << some.status().message();
      if (!some) break;
      all.insert(all.end(), some->begin(), some->end());
    }
    return all;
  }

  std::unique_ptr<Fixture> fixture_;
  std::unique_ptr<ControlStore> store_;
};

TEST_P(StoreTest, PutRangeDelete) {
  EXPECT_EQ(Keys("a/"), std::vector<std::string>());
  ASSERT_TRUE(store_->Put("a/2", "two").ok());
  ASSERT_TRUE(store_->Put("a/1", "one").ok());
  ASSERT_TRUE(store_->Put("b/1", "other").ok());
  ASSERT_TRUE(store_->Put("a", "shorter").ok());
  EXPECT_EQ(Keys("a/"), (std::vector<std::string>{"a/1", "a/2"}));
  EXPECT_EQ(Keys(""), (std::vector<std::string>{"a", "a/1", "a/2", "b/1"}));
  ASSERT_TRUE(store_->Delete("a/1").ok());
  ASSERT_TRUE(store_->Delete("a/1").ok());
  const auto snapshot = store_->Range("a/");
  ASSERT_TRUE(snapshot);
  ASSERT_EQ(snapshot->entries.size(), 1u);
  EXPECT_EQ(snapshot->entries[0].value, "two");
  EXPECT_LT(snapshot->entries[0].revision, snapshot->revision);
}

TEST_P(StoreTest, AnyBytes) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes.push_back(static_cast<char>(i));
  for (size_t cut = 0; cut < 4; ++cut) {
    ASSERT_TRUE(store_->Put("\xff\xff" + bytes.substr(cut), bytes.substr(cut)).ok());
  }
  const auto snapshot = store_->Range("\xff\xff");
  ASSERT_TRUE(snapshot);
  ASSERT_EQ(snapshot->entries.size(), 4u);
  for (const StoreEntry& entry : snapshot->entries) EXPECT_EQ(entry.key, "\xff\xff" + entry.value);
  ASSERT_TRUE(store_->Put("empty", "").ok());
  EXPECT_EQ(store_->Range("empty")->entries[0].value, "");
}

TEST_P(StoreTest, ManyWritesAndALargeRange) {
  std::vector<StoreWrite> writes;
  for (int i = 0; i < 1000; ++i) {
    writes.push_back({StrCat("many/", 1000 + i), std::string(static_cast<size_t>(i), 'x')});
  }
  ASSERT_TRUE(store_->PutMany(writes).ok());
  const auto snapshot = store_->Range("many/");
  ASSERT_TRUE(snapshot);
  ASSERT_EQ(snapshot->entries.size(), 1000u);
  for (size_t i = 0; i < 1000; ++i) EXPECT_EQ(snapshot->entries[i].value.size(), i);
  EXPECT_TRUE(store_->PutMany({}).ok());
}

TEST_P(StoreTest, HandlesShareOneStore) {
  const auto other = fixture_->Handle();
  ASSERT_TRUE(other->Put("k", "v").ok());
  EXPECT_EQ(Keys("k"), std::vector<std::string>{"k"});
}

TEST_P(StoreTest, KeysVanishWithTheirLease) {
  const auto lease = store_->GrantLease(3 * kSecond);
  ASSERT_TRUE(lease) << lease.error().message();
  ASSERT_TRUE(store_->Put("l/1", "a", *lease).ok());
  ASSERT_TRUE(store_->Put("l/2", "b").ok());
  EXPECT_EQ(store_->Range("l/1")->entries[0].lease, *lease);
  for (int i = 0; i < 7; ++i) {  // longer than the lease, kept alive
    fixture_->Pass(500 * kMilli);
    ASSERT_TRUE(store_->KeepAlive(*lease).ok());
  }
  EXPECT_EQ(Keys("l/").size(), 2u);
  EXPECT_TRUE(Within(20 * kSecond, [&] { return Keys("l/") == std::vector<std::string>{"l/2"}; }));
  EXPECT_EQ(store_->KeepAlive(*lease).code(), Code::kNotFound);
  EXPECT_EQ(store_->Put("l/3", "c", *lease).code(), Code::kNotFound);
  EXPECT_TRUE(store_->Revoke(*lease).ok());
}

TEST_P(StoreTest, AWriteWithoutTheLeaseFreesTheKey) {
  const auto lease = store_->GrantLease(10 * kSecond);
  ASSERT_TRUE(lease);
  ASSERT_TRUE(store_->Put("f/1", "a", *lease).ok());
  ASSERT_TRUE(store_->Put("f/2", "a", *lease).ok());
  ASSERT_TRUE(store_->Put("f/1", "b").ok());
  ASSERT_TRUE(store_->Revoke(*lease).ok());
  EXPECT_EQ(Keys("f/"), std::vector<std::string>{"f/1"});
}

TEST_P(StoreTest, WatchSeesEverythingFromItsRevision) {
  ASSERT_TRUE(store_->Put("w/0", "before").ok());
  const auto snapshot = store_->Range("w/");
  ASSERT_TRUE(snapshot);
  ASSERT_TRUE(store_->Put("w/1", "a").ok());
  const auto watch = store_->Watch("w/", snapshot->revision + 1);
  ASSERT_TRUE(watch);
  const auto lease = store_->GrantLease(10 * kSecond);
  const std::vector<StoreWrite> two = {{"w/2", "b", 0}, {"w/3", "c", *lease}};
  ASSERT_TRUE(store_->PutMany(two).ok());
  ASSERT_TRUE(store_->Put("x", "elsewhere").ok());
  ASSERT_TRUE(store_->Delete("w/0").ok());
  ASSERT_TRUE(store_->Revoke(*lease).ok());
  const std::vector<StoreEvent> events = Events(**watch, 5);
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[0].key, "w/1");
  EXPECT_EQ(events[0].value, "a");
  EXPECT_EQ((std::set<std::string>{events[1].key, events[2].key}),
            (std::set<std::string>{"w/2", "w/3"}));
  EXPECT_EQ(events[1].revision, events[2].revision);
  EXPECT_EQ(events[3].key, "w/0");
  EXPECT_EQ(events[3].value, std::nullopt);
  EXPECT_EQ(events[4].key, "w/3");
  EXPECT_EQ(events[4].value, std::nullopt);
  const auto none = (*watch)->Poll(0);
  ASSERT_TRUE(none);
  EXPECT_TRUE(none->empty());
}

TEST_P(StoreTest, EtcdIsSharedAndMemoryIsNot) {
  EXPECT_EQ(store_->shared(), std::string(GetParam()) != "memory");
}

TEST_P(StoreTest, CompactedEventsAreGoneAndTheRestIsNot) {
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(store_->Put("c", std::to_string(i)).ok());
  const int64_t revision = store_->Range("c")->revision;
  ASSERT_TRUE(store_->Put("c", "after").ok());
  ASSERT_TRUE(store_->Compact(revision).ok());
  ASSERT_TRUE(store_->Compact(revision).ok());
  ASSERT_TRUE(store_->Compact(revision - 1).ok());
  const auto late = store_->Watch("c", 2);
  ASSERT_TRUE(late);
  Status status;
  for (int i = 0; i < 200 && status.ok(); ++i) status = (*late)->Poll(50 * kMilli).status();
  EXPECT_EQ(status.code(), Code::kChanged) << status.message();
  const auto watch = store_->Watch("c", revision + 1);
  const std::vector<StoreEvent> events = Events(**watch, 1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].value, "after");
  EXPECT_EQ(store_->Range("c")->entries[0].value, "after");
}

TEST_P(StoreTest, OneLeadsUntilItsLeaseEnds) {
  const auto other = fixture_->Handle();
  EXPECT_FALSE(store_->Leader("lead")->has_value());
  const LeaseId a = *store_->GrantLease(2 * kSecond);
  const LeaseId b = *other->GrantLease(60 * kSecond);
  EXPECT_EQ(store_->Campaign("lead", "A", 0).error().code(), Code::kInvalidArgument);
  EXPECT_EQ(store_->Campaign("lead", "A", a)->lease, a);
  EXPECT_EQ(other->Campaign("lead", "B", b)->name, "A");
  EXPECT_EQ(store_->Campaign("lead", "A", a)->lease, a);  // asked again
  EXPECT_EQ((*other->Leader("lead"))->name, "A");
  const std::vector<StoreWrite> write = {{"decision", "by A", 0}};
  const Fence as_a{"lead", a};
  const Fence as_b{"lead", b};
  EXPECT_TRUE(store_->PutMany(write, &as_a).ok());
  EXPECT_EQ(other->PutMany(write, &as_b).code(), Code::kCancelled);
  // A falls silent.
  EXPECT_TRUE(Within(20 * kSecond, [&] { return other->Campaign("lead", "B", b)->lease == b; }));
  EXPECT_EQ(store_->PutMany(write, &as_a).code(), Code::kCancelled);
  EXPECT_EQ(store_->PutMany({}, &as_a).code(), Code::kCancelled);
  EXPECT_TRUE(other->PutMany(write, &as_b).ok());
  EXPECT_EQ(store_->Campaign("lead", "A", a)->name, "B");
}

INSTANTIATE_TEST_SUITE_P(All, StoreTest, ::testing::Values("memory", "etcd", "etcd_secured"),
                         [](const auto& each) { return std::string(each.param); });

TEST(MemoryStore, DownMeansUnavailable) {
  ManualClock clock;
  MemoryStoreState state(clock);
  MemoryStore store(state);
  ASSERT_TRUE(store.Put("a", "1").ok());
  const auto watch = store.Watch("a", 1);
  state.SetDown(true);
  EXPECT_EQ(store.Put("a", "2").code(), Code::kUnavailable);
  EXPECT_EQ(store.Range("a").error().code(), Code::kUnavailable);
  EXPECT_EQ((*watch)->Poll(0).error().code(), Code::kUnavailable);
  state.SetDown(false);
  EXPECT_EQ(store.Range("a")->entries[0].value, "1");
  EXPECT_EQ((*watch)->Poll(0)->size(), 1u);
}

TEST(MemoryStore, AWatchThatIsTooFarBehindSaysSo) {
  ManualClock clock;
  MemoryStoreState state(clock);
  MemoryStore store(state);
  const auto watch = store.Watch("", 1);
  std::vector<StoreWrite> writes;
  for (int i = 0; i < 1000; ++i) writes.push_back({std::to_string(i), ""});
  for (int i = 0; i < 101; ++i) ASSERT_TRUE(store.PutMany(writes).ok());
  EXPECT_EQ((*watch)->Poll(0).error().code(), Code::kChanged);
}

TEST(PrefixEnd, IsTheNextPrefix) {
  EXPECT_EQ(PrefixEnd("a/"), "a0");
  EXPECT_EQ(PrefixEnd("a\xff"), "b");
  EXPECT_EQ(PrefixEnd("\xff"), "");
  EXPECT_EQ(PrefixEnd(""), "");
}

class EtcdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdProcess::Installed()) {
      GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
    }
    etcd_ = EtcdProcess::Start();
    ASSERT_NE(etcd_, nullptr) << "etcd does not start";
  }
  std::unique_ptr<EtcdStore> Store(Nanos deadline, std::vector<std::string> more = {}) {
    EtcdOptions options;
    options.endpoints = std::move(more);
    options.endpoints.push_back(etcd_->endpoint());
    options.deadline = deadline;
    return *EtcdStore::Make(options);
  }
  static Nanos Now() { return SteadyClock().Now(); }

  std::unique_ptr<EtcdProcess> etcd_;
};

TEST_F(EtcdTest, AFrozenServerCostsOneDeadline) {
  const auto patient = Store(20 * kSecond);  // the machine may be busy
  ASSERT_TRUE(patient->Put("a", "1").ok());
  const auto store = Store(300 * kMilli);
  for (int i = 0; i < 100 && !store->Range("a"); ++i) {  // it has a connection
  }
  const auto watch = store->Watch("a", 1);
  ASSERT_EQ((*watch)->Poll(5 * kSecond)->size(), 1u);
  etcd_->Freeze();
  const Nanos begin = Now();
  const Status status = store->Put("a", "2");
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_NE(status.message().find(etcd_->endpoint()), std::string::npos) << status.message();
  EXPECT_EQ(store->Range("a").error().code(), Code::kDeadlineExceeded);
  EXPECT_EQ((*watch)->Poll(100 * kMilli)->size(), 0u);
  EXPECT_LT(Now() - begin, 5 * kSecond);
  etcd_->Thaw();
  EXPECT_TRUE(patient->Put("a", "3").ok());
}

TEST_F(EtcdTest, ADeadServerIsAnErrorAtOnceAndComesBack) {
  const auto store = Store(20 * kSecond);
  ASSERT_TRUE(store->Put("a", "1").ok());
  const auto snapshot = store->Range("a");
  const auto watch = store->Watch("a", snapshot->revision + 1);
  EXPECT_TRUE((*watch)->Poll(0)->empty());
  etcd_->Kill();
  const Status status = store->Put("a", "2");
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find(etcd_->endpoint()), std::string::npos) << status.message();
  EXPECT_EQ((*watch)->Poll(5 * kSecond).error().code(), Code::kUnavailable);
  etcd_->Launch();
  ASSERT_TRUE(etcd_->AwaitReady());
  EXPECT_EQ(store->Range("a")->entries[0].value, "1");
  ASSERT_TRUE(store->Put("a", "3").ok());
  std::vector<StoreEvent> seen;
  for (int i = 0; i < 100 && seen.empty(); ++i) {
    if (auto some = (*watch)->Poll(50 * kMilli)) seen = *some;
  }
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].value, "3");
}

TEST_F(EtcdTest, GoesOnWithAnotherEndpoint) {
  // Port 1 refuses; a socket that nobody accepts from is silent.
  const OwnedFd silent(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(silent.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(silent.get(), 1), 0);
  ::getsockname(silent.get(), reinterpret_cast<sockaddr*>(&address), &size);
  const auto store =
      Store(6 * kSecond, {"http://127.0.0.1:1", StrCat("127.0.0.1:", ntohs(address.sin_port))});
  EXPECT_TRUE(store->Put("a", "1").ok());
  const Nanos begin = Now();
  EXPECT_EQ(store->Range("a")->entries.size(), 1u);
  EXPECT_LT(Now() - begin, 2 * kSecond);  // it stays with the one that answered
}

TEST(EtcdOptions, Complaints) {
  EtcdOptions options;
  EXPECT_EQ(EtcdStore::Make(options).error().code(), Code::kInvalidArgument);
  for (const char* text : {"host", "host:0", "host:99999", ":1", "https://a", "ftp://a:1",
                           "https://http://a:1", "a b:1", "a:1x"}) {
    options.endpoints = {text};
    const auto store = EtcdStore::Make(options);
    ASSERT_FALSE(store) << text;
    EXPECT_NE(store.error().message().find("https://host:port"), std::string::npos) << text;
  }
  options.endpoints = {"http://[::1]:2379/"};
  ASSERT_TRUE(EtcdStore::Make(options));
  EXPECT_EQ((*EtcdStore::Make(options))->Describe(), "etcd at http://[::1]:2379");
  options.deadline = 0;
  EXPECT_FALSE(EtcdStore::Make(options));
}

TEST(EtcdOptions, ANameThatIsNotKnownIsAnError) {
  EtcdOptions options;
  options.endpoints = {"no-such-host.invalid:2379"};
  options.deadline = 5 * kSecond;
  const auto store = EtcdStore::Make(options);
  ASSERT_TRUE(store);
  const auto answer = (*store)->Range("a");
  ASSERT_FALSE(answer);
  EXPECT_NE(answer.error().message().find("no-such-host.invalid"), std::string::npos);
}

}  // namespace
}  // namespace forebay::control
