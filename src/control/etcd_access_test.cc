// An etcd that asks who one is, by TLS and by password: who is let in, and what others are told.
#include "control/etcd_access.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/etcd_process.h"
#include "control/etcd_store.h"
#include "transport/transport.h"

namespace forebay::control {
namespace {

using testing::Certificates;
using testing::EtcdProcess;

constexpr Nanos kPatient = 20 * kSecond;  // the machine may be busy

class EtcdAccessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdProcess::Installed()) GTEST_SKIP() << "etcd is not installed: apt install etcd-server";
    if (!TlsVersion()) GTEST_SKIP() << TlsVersion().error().message();
    ASSERT_TRUE(certificates_.ok()) << "openssl makes no certificates: apt install openssl";
  }
  void Start(bool mutual, const std::string& server = "server",
             std::vector<std::string> more = {}) {
    etcd_ = EtcdProcess::StartTls(certificates_, mutual, server, std::move(more));
    ASSERT_NE(etcd_, nullptr) << "etcd does not start";
  }
  // With users, whose tokens are signed and good for `ttl`. (Those in etcd's memory last for five
  // minutes after their last use, and often come back with its log when it restarts.)
  void StartSigned(bool mutual, const std::string& ttl) {
    ASSERT_NO_FATAL_FAILURE(Start(mutual, "server",
                                  {StrCat("--auth-token=jwt,sign-method=ES256,ttl=", ttl,
                                          ",pub-key=", certificates_.Cert("server"),
                                          ",priv-key=", certificates_.Key("server"))}));
    ASSERT_TRUE(etcd_->SetUsers());
  }
  static std::unique_ptr<EtcdStore> Store(const EtcdOptions& options) {
    auto store = EtcdStore::Make(options);
    EXPECT_TRUE(store) << store.status().ToString();
    return store ? *std::move(store) : nullptr;
  }
  // What a store and a watch with these options are told; both the same.
  static Status Refusal(const EtcdOptions& options) {
    const auto store = Store(options);
    if (store == nullptr) return Status();
    const Status status = store->Range("a").status();
    const Status watch = (*store->Watch("a", 1))->Poll(kPatient).status();
    EXPECT_EQ(watch.code(), status.code()) << watch.ToString() << status.ToString();
    EXPECT_NE(watch.message().find(options.endpoints[0]), std::string::npos) << watch.ToString();
    EXPECT_NE(status.message().find(options.endpoints[0]), std::string::npos) << status.ToString();
    return status;
  }
  static bool Says(const Status& status, std::string_view words) {
    return status.message().find(words) != std::string::npos;
  }

  Certificates certificates_;
  std::unique_ptr<EtcdProcess> etcd_;
};

TEST_F(EtcdAccessTest, AServerOfAnotherAuthorityIsNotBelieved) {
  Start(false);
  EtcdOptions options = etcd_->options(kPatient);
  options.access.ca_file = certificates_.Cert("other");
  Status status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(Says(status, "not trusted") && Says(status, "FOREBAY_ETCD_CACERT") &&
              Says(status, options.access.ca_file))
      << status.ToString();
  // Nor by those that the system trusts.
  options.access.ca_file.clear();
  status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(Says(status, "FOREBAY_ETCD_CACERT")) << status.ToString();
  EXPECT_TRUE(Store(etcd_->options(kPatient))->Put("a", "1").ok());
}

TEST_F(EtcdAccessTest, AServerOfAnotherNameIsNotBelieved) {
  Start(false, "elsewhere");
  const Status status = Refusal(etcd_->options(kPatient));
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(Says(status, "not for 127.0.0.1")) << status.ToString();
}

TEST_F(EtcdAccessTest, WithoutAClientCertificateTheServerRefuses) {
  Start(true);
  EXPECT_TRUE(Store(etcd_->options(kPatient))->Put("a", "1").ok());
  EtcdOptions options = etcd_->options(kPatient);
  options.access.cert_file.clear();
  options.access.key_file.clear();
  Status status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(Says(status, "wants a client certificate") && Says(status, "FOREBAY_ETCD_CERT") &&
              Says(status, "FOREBAY_ETCD_KEY"))
      << status.ToString();
  // Another authority's.
  options.access.cert_file = certificates_.Cert("stranger");
  options.access.key_file = certificates_.Key("stranger");
  status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_TRUE(Says(status, "FOREBAY_ETCD_CERT") && Says(status, options.access.cert_file))
      << status.ToString();
}

TEST_F(EtcdAccessTest, TlsAndPlainHttpDoNotMeet) {
  Start(false);
  EtcdOptions options = etcd_->options(kPatient);
  options.endpoints = {"http://" + etcd_->host_port()};
  const Status refused = Refusal(options);
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_TRUE(Says(refused, "is it https instead of http?")) << refused.ToString();
  const auto plain = EtcdProcess::Start();
  ASSERT_NE(plain, nullptr);
  options.endpoints = {"https://" + plain->host_port()};
  const Status status = Refusal(options);
  EXPECT_TRUE(Says(status, "is it http instead of https?")) << status.ToString();
}

TEST_F(EtcdAccessTest, WithoutTheRightPasswordNothingIsGiven) {
  Start(false);
  ASSERT_TRUE(etcd_->SetUsers());
  EXPECT_TRUE(Store(etcd_->options(kPatient))->Put("a", "1").ok());

  EtcdOptions options = etcd_->options(kPatient);
  options.access.password = "not the password";
  Status status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_TRUE(Says(status, "FOREBAY_ETCD_PASSWORD") && Says(status, "FOREBAY_ETCD_USER"))
      << status.ToString();
  EXPECT_FALSE(Says(status, options.access.password)) << status.ToString();

  options.access.user.clear();
  options.access.password.clear();
  status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_TRUE(Says(status, "FOREBAY_ETCD_USER")) << status.ToString();
}

TEST_F(EtcdAccessTest, APasswordForAnEtcdThatAsksForNoneIsAnError) {
  Start(false);
  EtcdOptions options = etcd_->options(kPatient);
  options.access.user = "forebay";
  options.access.password = "in vain";
  const Status status = Refusal(options);
  EXPECT_EQ(status.code(), Code::kPermissionDenied);
  EXPECT_TRUE(Says(status, "unset FOREBAY_ETCD_USER")) << status.ToString();
}

TEST_F(EtcdAccessTest, AnEtcdThatRestartsAndTakesTheTokenNoMoreIsAskedForAnother) {
  ASSERT_NO_FATAL_FAILURE(StartSigned(true, "3s"));
  const auto store = Store(etcd_->options(kPatient));
  ASSERT_TRUE(store->Put("a", "1").ok());
  const auto snapshot = store->Range("a");
  ASSERT_TRUE(snapshot);
  const auto watch = *store->Watch("a", snapshot->revision + 1);
  ASSERT_TRUE(watch->Poll(0));
  etcd_->Kill();
  EXPECT_FALSE(store->Put("a", "2").ok());
  EXPECT_FALSE(watch->Poll(kPatient));
  std::this_thread::sleep_for(std::chrono::milliseconds(4500));  // the token ends
  etcd_->Launch();
  ASSERT_TRUE(etcd_->AwaitReady());
  const Status put = store->Put("a", "3");
  ASSERT_TRUE(put.ok()) << put.ToString();
  std::vector<StoreEvent> seen;
  Status last;
  for (int i = 0; i < 100 && seen.empty(); ++i) {
    auto some = watch->Poll(200 * kMilli);
    if (some) {
      seen = *some;
    } else {
      last = some.error();
    }
  }
  ASSERT_EQ(seen.size(), 1u) << last.ToString();
  EXPECT_EQ(seen[0].value, "3");
}

// Signed tokens carry the state of the rights that they were given for.
TEST_F(EtcdAccessTest, ATokenOfBeforeAChangeOfRightsIsRenewed) {
  ASSERT_NO_FATAL_FAILURE(StartSigned(false, "10m"));
  const auto store = Store(etcd_->options(kPatient));
  ASSERT_TRUE(store->Put("a", "1").ok());
  ASSERT_TRUE(etcd_->ChangeRights());
  const Status put = store->Put("a", "2");
  EXPECT_TRUE(put.ok()) << put.ToString();
}

// Who accepts and says nothing, also in the middle of TLS, costs one deadline.
TEST_F(EtcdAccessTest, ASilentServerCostsOneDeadline) {
  const OwnedFd silent(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(silent.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(silent.get(), 1), 0);
  ::getsockname(silent.get(), reinterpret_cast<sockaddr*>(&address), &size);
  EtcdOptions options;
  options.endpoints = {StrCat("https://127.0.0.1:", ntohs(address.sin_port))};
  options.access.ca_file = certificates_.Cert("ca");
  options.deadline = 200 * kMilli;
  EXPECT_EQ(Refusal(options).code(), Code::kDeadlineExceeded);

  Start(false);
  const auto store = Store(etcd_->options(300 * kMilli));
  for (int i = 0; i < 100 && !store->Range("a"); ++i) {  // it has a connection
  }
  etcd_->Freeze();
  const Status status = store->Put("a", "2");
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  etcd_->Thaw();
  EXPECT_TRUE(Store(etcd_->options(kPatient))->Put("a", "3").ok());
}

TEST_F(EtcdAccessTest, FilesThatCannotBeUsedAreNamed) {
  EtcdOptions options;
  options.endpoints = {"https://127.0.0.1:1"};
  const auto complaint = [&] { return EtcdStore::Make(options).status(); };
  const std::string empty = certificates_.folder() + "/empty";
  std::ofstream(empty).close();

  options.access.ca_file = certificates_.folder() + "/none";
  EXPECT_EQ(complaint().code(), Code::kNotFound);
  EXPECT_TRUE(Says(complaint(), "FOREBAY_ETCD_CACERT") && Says(complaint(), "/none"));
  options.access.ca_file = empty;
  EXPECT_EQ(complaint().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Says(complaint(), "FOREBAY_ETCD_CACERT") && Says(complaint(), empty));

  options.access.ca_file = certificates_.Cert("ca");
  options.access.cert_file = certificates_.Cert("client");
  EXPECT_TRUE(Says(complaint(), "go together")) << complaint().ToString();
  options.access.key_file = certificates_.Key("stranger");
  EXPECT_EQ(complaint().code(), Code::kInvalidArgument);
  EXPECT_TRUE(Says(complaint(), "FOREBAY_ETCD_KEY")) << complaint().ToString();

  options.access.key_file = certificates_.Key("client");
  EXPECT_TRUE(complaint().ok()) << complaint().ToString();
  ASSERT_EQ(::chmod(options.access.key_file.c_str(), 0644), 0);
  EXPECT_EQ(complaint().code(), Code::kPermissionDenied);
  EXPECT_TRUE(Says(complaint(), "chmod 600")) << complaint().ToString();
}

class EtcdEnvironment : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "forebay-password-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    file_ = name + "/password";
    Write("from a file\n");
  }
  void TearDown() override {
    std::filesystem::remove_all(std::filesystem::path(file_).parent_path());
  }
  void Write(const std::string& text, mode_t mode = 0600) {
    std::ofstream(file_, std::ios::trunc) << text;
    ASSERT_EQ(::chmod(file_.c_str(), mode), 0);
  }
  Result<EtcdAccess> Read() const {
    return EtcdAccess::FromEnvironment([&](std::string_view name) -> std::optional<std::string> {
      const auto found = variables_.find(std::string(name));
      if (found == variables_.end()) return std::nullopt;
      return found->second;
    });
  }

  std::string file_;
  std::map<std::string, std::string> variables_;
};

TEST_F(EtcdEnvironment, TellsHowAndAsWhom) {
  EXPECT_EQ(Read()->user, "");
  variables_ = {{"FOREBAY_ETCD_CACERT", "/ca"},
                {"FOREBAY_ETCD_CERT", "/cert"},
                {"FOREBAY_ETCD_KEY", "/key"},
                {"FOREBAY_ETCD_USER", "me"},
                {"FOREBAY_ETCD_PASSWORD", "x"}};
  Result<EtcdAccess> access = Read();
  ASSERT_TRUE(access) << access.error().ToString();
  EXPECT_EQ(access->ca_file, "/ca");
  EXPECT_EQ(access->cert_file, "/cert");
  EXPECT_EQ(access->key_file, "/key");
  EXPECT_EQ(access->user, "me");
  EXPECT_EQ(access->password, "x");
  variables_.erase("FOREBAY_ETCD_PASSWORD");
  variables_["FOREBAY_ETCD_PASSWORD_FILE"] = file_;
  access = Read();
  ASSERT_TRUE(access) << access.error().ToString();
  EXPECT_EQ(access->password, "from a file");
}

TEST_F(EtcdEnvironment, AFileThatOthersCanReadIsRefused) {
  variables_ = {{"FOREBAY_ETCD_USER", "me"}, {"FOREBAY_ETCD_PASSWORD_FILE", file_}};
  Write("from a file", 0640);
  Result<EtcdAccess> access = Read();
  ASSERT_FALSE(access);
  EXPECT_EQ(access.error().code(), Code::kPermissionDenied);
  for (const std::string& words :
       {file_, std::string("FOREBAY_ETCD_PASSWORD_FILE"), std::string("chmod 600")}) {
    EXPECT_NE(access.error().message().find(words), std::string::npos) << words;
  }
  Write("from a file");
  const std::string link = file_ + "-link";
  ASSERT_EQ(::symlink(file_.c_str(), link.c_str()), 0);
  variables_["FOREBAY_ETCD_PASSWORD_FILE"] = link;
  EXPECT_EQ(Read().error().code(), Code::kPermissionDenied);
  variables_["FOREBAY_ETCD_PASSWORD_FILE"] = file_ + "-none";
  EXPECT_EQ(Read().error().code(), Code::kNotFound);
}

TEST_F(EtcdEnvironment, HalfOfItIsAnError) {
  const auto complaint = [&](std::map<std::string, std::string> variables) {
    variables_ = std::move(variables);
    const Result<EtcdAccess> access = Read();
    return access ? std::string() : access.error().message();
  };
  const auto names = [](const std::string& text, std::string_view name) {
    return text.find(name) != std::string::npos && text.find("hidden") == std::string::npos;
  };
  EXPECT_TRUE(names(complaint({{"FOREBAY_ETCD_USER", "me"}}), "FOREBAY_ETCD_PASSWORD_FILE"));
  EXPECT_TRUE(names(complaint({{"FOREBAY_ETCD_PASSWORD", "hidden"}}), "FOREBAY_ETCD_USER"));
  EXPECT_TRUE(names(complaint({{"FOREBAY_ETCD_CERT", "/cert"}}), "FOREBAY_ETCD_KEY"));
  EXPECT_TRUE(names(complaint({{"FOREBAY_ETCD_USER", "me"},
                               {"FOREBAY_ETCD_PASSWORD", "hidden"},
                               {"FOREBAY_ETCD_PASSWORD_FILE", file_}}),
                    "unset one"));
  Write("\n");
  EXPECT_TRUE(names(complaint({{"FOREBAY_ETCD_USER", "me"}, {"FOREBAY_ETCD_PASSWORD_FILE", file_}}),
                    "is empty"));
}

TEST(EtcdOptions, APasswordInPlainTextIsToldOf) {
  EtcdOptions options;
  const auto warning = [&](std::vector<std::string> endpoints) {
    options.endpoints = std::move(endpoints);
    return (*EtcdStore::Make(options))->Warning();
  };
  EXPECT_EQ(warning({"http://etcd.example:2379"}), "");
  options.access.user = "me";
  options.access.password = "hidden";
  const std::string told = warning({"http://127.0.0.1:2379", "http://etcd.example:2379"});
  EXPECT_NE(told.find("http://etcd.example:2379"), std::string::npos) << told;
  EXPECT_EQ(told.find("hidden"), std::string::npos);
  EXPECT_NE(warning({"http://10.0.0.1:2379"}), "");
  EXPECT_EQ(warning({"http://127.0.0.1:2379", "http://[::1]:2379", "localhost:2379"}), "");
  if (TlsVersion()) {
    EXPECT_EQ(warning({"https://etcd.example:2379"}), "");
  }
}

}  // namespace
}  // namespace forebay::control
