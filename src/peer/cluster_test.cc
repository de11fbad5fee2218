#include "peer/cluster.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "peer/membership_hosts.h"

namespace forebay::peer {
namespace {

using Method = ClusterSpec::Method;
using Environment = std::map<std::string, std::string, std::less<>>;

Result<ClusterSpec> From(const Environment& environment, std::string_view suffix = "") {
  const auto get = [&](std::string_view name) -> std::optional<std::string> {
    const auto at = environment.find(name);
    if (at == environment.end()) return std::nullopt;
    return at->second;
  };
  return ClusterFromEnvironment(get, suffix);
}

// The error's text; "" where there is none.
std::string Error(const Environment& environment) { return From(environment).status().message(); }

Environment Torchrun(int node, int nodes) {
  return {{"MASTER_ADDR", "10.0.0.1"},
          {"MASTER_PORT", "29500"},
          {"RANK", std::to_string(node * 8)},
          {"LOCAL_RANK", "0"},
          {"WORLD_SIZE", std::to_string(nodes * 8)},
          {"LOCAL_WORLD_SIZE", "8"},
          {"GROUP_RANK", std::to_string(node)},
          {"GROUP_WORLD_SIZE", std::to_string(nodes)},
          {"TORCHELASTIC_RUN_ID", "run7"}};
}

TEST(Cluster, NothingSetIsOneNode) {
  const auto spec = From({});
  ASSERT_TRUE(spec);
  EXPECT_EQ(spec->method, Method::kNone);
  EXPECT_EQ(spec->nodes, 1u);
}

TEST(Cluster, Torchrun) {
  const auto spec = From(Torchrun(2, 4));
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->method, Method::kLauncher);
  EXPECT_EQ(spec->node, 2u);
  EXPECT_EQ(spec->nodes, 4u);
  EXPECT_EQ(spec->job, "torchrun-run7");
  EXPECT_EQ(spec->source, "torchrun's variables");
  const auto at = ParseHostPort(spec->master);
  ASSERT_TRUE(at);
  EXPECT_EQ(at->host, "10.0.0.1");
  EXPECT_GE(at->port, kDefaultPort);
  EXPECT_LT(at->port, kDefaultPort + kPortRange);
  EXPECT_EQ(From(Torchrun(0, 4))->master, spec->master) << "all nodes must find the same port";

  Environment other = Torchrun(2, 4);
  other["TORCHELASTIC_RUN_ID"] = "run8";
  EXPECT_NE(From(other)->master, spec->master) << "two jobs on one node 0";
  // The job's own port is never PyTorch's.
  Environment clash = Torchrun(2, 4);
  clash["MASTER_PORT"] = std::to_string(at->port);
  EXPECT_NE(From(clash)->master, spec->master);

  EXPECT_EQ(From(Torchrun(0, 1))->method, Method::kNone);
}

TEST(Cluster, RunWithoutAnIdIsNamedByItsMaster) {
  Environment environment = Torchrun(1, 2);
  environment["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(From(environment)->job, "10.0.0.1:29500");
}

TEST(Cluster, SingleFields) {
  Environment environment = Torchrun(1, 2);
  environment["FOREBAY_PEER_PORT"] = "9000";
  environment["FOREBAY_PEER_LISTEN"] = "10.1.0.2";
  environment["FOREBAY_PEER_SECRET"] = "/s";
  const auto spec = From(environment);
  ASSERT_TRUE(spec);
  EXPECT_EQ(spec->master, "10.0.0.1:9000");
  EXPECT_EQ(spec->listen, "10.1.0.2");
  EXPECT_EQ(spec->secret_file, "/s");
  EXPECT_EQ(*OwnHost(*spec), "10.1.0.2");
  environment["MASTER_ADDR"] = "fe00::1";
  EXPECT_EQ(From(environment)->master, "[fe00::1]:9000");
  environment["FOREBAY_PEERS"] = "off";
  EXPECT_EQ(From(environment)->method, Method::kNone);
}

TEST(Cluster, Slurm) {
  Environment environment = {{"SLURM_NODEID", "3"},
                             {"SLURM_NNODES", "4"},
                             {"SLURM_JOB_ID", "77"},
                             {"SLURM_JOB_NODELIST", "n[01-03,7]"}};
  const auto spec = From(environment);
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->method, Method::kLauncher);
  EXPECT_EQ(spec->node, 3u);
  EXPECT_EQ(spec->nodes, 4u);
  EXPECT_EQ(spec->job, "slurm-77");
  EXPECT_EQ(ParseHostPort(spec->master)->host, "n01");
  // A step on some of the job's nodes has a first node of its own.
  environment["SLURM_STEP_ID"] = "2";
  environment["SLURM_STEP_NODELIST"] = "n[03,7]";
  environment["SLURM_STEP_NUM_NODES"] = "2";
  environment["SLURM_NODEID"] = "1";
  EXPECT_EQ(From(environment)->nodes, 2u);
  EXPECT_EQ(From(environment)->job, "slurm-77.2");
  EXPECT_EQ(ParseHostPort(From(environment)->master)->host, "n03");
  environment["MASTER_ADDR"] = "ib-n03";
  EXPECT_EQ(ParseHostPort(From(environment)->master)->host, "ib-n03");
}

TEST(Cluster, ScriptOfSbatchIsAlone) {
  EXPECT_EQ(From({{"ENVIRONMENT", "BATCH"},
                  {"SLURM_NODEID", "0"},
                  {"SLURM_NNODES", "4"},
                  {"SLURM_JOB_ID", "77"},
                  {"SLURM_JOB_NODELIST", "n[01-03,7]"}})
                ->method,
            Method::kNone);
}

TEST(Cluster, FirstHostOfSlurmsList) {
  EXPECT_EQ(FirstHost("n[01-04,7]"), "n01");
  EXPECT_EQ(FirstHost("node7"), "node7");
  EXPECT_EQ(FirstHost("a,b"), "a");
  EXPECT_EQ(FirstHost("a3,n[1-2]"), "a3");
  EXPECT_EQ(FirstHost("n[7]"), "n7");
  EXPECT_EQ(FirstHost("n[7,9-11].site.org,m2"), "n7.site.org");
  EXPECT_EQ(FirstHost("rack[2-3]n[004-009]"), "rack2n004");
  EXPECT_EQ(FirstHost(""), "");
  EXPECT_EQ(FirstHost("n["), "");
  EXPECT_EQ(FirstHost("n[x]"), "");
  EXPECT_EQ(FirstHost("n[]"), "");
  EXPECT_EQ(FirstHost("n[1"), "");
  EXPECT_EQ(FirstHost(",a"), "");
}

TEST(Cluster, OpenMpi) {
  Environment environment = {{"MASTER_ADDR", "h0"},
                             {"OMPI_COMM_WORLD_RANK", "5"},
                             {"OMPI_COMM_WORLD_SIZE", "8"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
  EXPECT_EQ(From(environment)->node, 2u);
  EXPECT_EQ(From(environment)->nodes, 4u);
  // --map-by node: ranks 1 and 5 are on node 1.
  environment["OMPI_COMM_WORLD_RANK"] = "4";
  EXPECT_EQ(From(environment)->node, 0u);
  environment["OMPI_COMM_WORLD_RANK"] = "6";
  EXPECT_EQ(From(environment)->node, 2u);
  // What cannot be known turns peers off, and says so.
  environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "3";
  EXPECT_EQ(From(environment)->method, Method::kNone);
  EXPECT_NE(From(environment)->open.find("FOREBAY_NODE"), std::string::npos);
  environment["FOREBAY_NODE"] = "1";
  environment["FOREBAY_NODES"] = "3";
  EXPECT_EQ(From(environment)->node, 1u);
  EXPECT_EQ(From(environment)->method, Method::kLauncher);
  environment.erase("MASTER_ADDR");
  EXPECT_EQ(From(environment)->method, Method::kNone);
  EXPECT_NE(From(environment)->open.find("MASTER_ADDR"), std::string::npos);
}

// mpirun on the first of four nodes starts its daemons on the other three by srun.
TEST(Cluster, OpenMpiInASlurmJob) {
  Environment first = {{"OMPI_COMM_WORLD_RANK", "1"},
                       {"OMPI_COMM_WORLD_SIZE", "8"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                       {"PMIX_NAMESPACE", "3372482561"},
                       {"SLURM_JOB_ID", "77"},
                       {"SLURM_NODEID", "0"},
                       {"SLURM_NNODES", "4"},
                       {"SLURM_JOB_NODELIST", "n[01-03,7]"}};
  Environment third = first;
  first["ENVIRONMENT"] = "BATCH";
  third["OMPI_COMM_WORLD_RANK"] = "5";
  third["SLURM_STEP_ID"] = "0";
  third["SLURM_NODEID"] = "1";
  third["SLURM_STEP_NUM_NODES"] = "3";
  third["SLURM_STEP_NODELIST"] = "n[02-03,7]";
  for (const Environment& environment : {first, third}) {
    const auto spec = From(environment);
    ASSERT_TRUE(spec) << spec.status().message();
    EXPECT_EQ(spec->method, Method::kLauncher);
    EXPECT_EQ(spec->nodes, 4u);
    EXPECT_EQ(spec->job, "slurm-77-mpi-3372482561");
    EXPECT_EQ(ParseHostPort(spec->master)->host, "n01");
  }
  EXPECT_EQ(From(first)->node, 0u);
  EXPECT_EQ(From(third)->node, 2u);
}

TEST(Cluster, SrunThatSetsAnMpiRankIsSlurms) {
  const auto spec = From({{"PMI_RANK", "5"},
                          {"PMI_SIZE", "8"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_NUM_NODES", "2"},
                          {"SLURM_STEP_NODELIST", "n[1-2]"},
                          {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "0"}});
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->node, 1u);
  EXPECT_EQ(spec->nodes, 2u);
  EXPECT_EQ(spec->job, "slurm-77.0");
}

TEST(Cluster, ASuffixMakesAnotherCluster) {
  const auto files = From(Torchrun(1, 2), "-files");
  ASSERT_TRUE(files) << files.status().message();
  EXPECT_EQ(files->job, "torchrun-run7-files");
  EXPECT_NE(files->master, From(Torchrun(1, 2))->master);
}

TEST(Cluster, Mpich) {
  const auto spec =
      From({{"MASTER_ADDR", "h0"}, {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "1"}});
  EXPECT_EQ(spec->node, 3u);
  EXPECT_EQ(spec->nodes, 4u);
  EXPECT_EQ(From({{"MASTER_ADDR", "h0"}, {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}})->method,
            Method::kNone);
}

TEST(Cluster, PlainPyTorchVariables) {
  const auto spec =
      From({{"MASTER_ADDR", "h0"}, {"RANK", "9"}, {"WORLD_SIZE", "16"}, {"LOCAL_WORLD_SIZE", "4"}});
  EXPECT_EQ(spec->node, 2u);
  EXPECT_EQ(spec->nodes, 4u);
  const auto spawned = From({{"MASTER_ADDR", "localhost"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(spawned->method, Method::kNone);
  EXPECT_EQ(spawned->open, "");
}

TEST(Cluster, StaticList) {
  Environment environment = {{"FOREBAY_PEERS", "a:1,b:2,[::1]:3"}, {"FOREBAY_NODE", "1"}};
  const auto spec = From(environment);
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->method, Method::kStatic);
  EXPECT_EQ(spec->nodes, 3u);
  EXPECT_EQ(spec->node, 1u);
  EXPECT_EQ(spec->nodes_at[2], "[::1]:3");
  environment["FOREBAY_PEERS"] = "a,b";
  environment["FOREBAY_PEER_PORT"] = "7000";
  EXPECT_EQ(From(environment)->nodes_at[1], "b:7000");
  EXPECT_EQ(From({{"FOREBAY_PEERS", "a:1"}})->method, Method::kNone);
}

TEST(Cluster, Etcd) {
  Environment environment = Torchrun(1, 3);
  environment["FOREBAY_PEERS"] = "etcd://e1:2379,e2:2379";
  const auto spec = From(environment);
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->method, Method::kEtcd);
  EXPECT_EQ(spec->node, 1u);
  EXPECT_EQ(spec->nodes, 3u);
  EXPECT_EQ(spec->EtcdEndpoints(), (std::vector<std::string>{"http://e1:2379", "http://e2:2379"}));
  environment["FOREBAY_PEERS"] = "etcds://e1:2379,e2:2379";
  const auto secured = From(environment);
  ASSERT_TRUE(secured) << secured.status().ToString();
  EXPECT_EQ(secured->method, Method::kEtcd);
  EXPECT_EQ(secured->EtcdEndpoints(),
            (std::vector<std::string>{"https://e1:2379", "https://e2:2379"}));
  EXPECT_EQ(
      From({{"FOREBAY_PEERS", "etcd://e:2379"}, {"FOREBAY_NODE", "0"}, {"FOREBAY_NODES", "2"}})
          ->method,
      Method::kEtcd);
}

TEST(Cluster, NonsenseIsNamed) {
  const auto with = [](Environment environment, const char* name, const char* value) {
    environment[name] = value;
    return Error(environment);
  };
  const auto names = [](const std::string& error, const char* name) {
    return error.find(name) != std::string::npos;
  };
  EXPECT_TRUE(names(with(Torchrun(1, 2), "GROUP_RANK", "x"), "GROUP_RANK"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "GROUP_RANK", "2"), "GROUP_RANK"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "GROUP_RANK", "-1"), "GROUP_RANK"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "GROUP_WORLD_SIZE", "99999"), "GROUP_WORLD_SIZE"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "MASTER_ADDR", "a b"), "MASTER_ADDR"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "FOREBAY_PEER_PORT", "0"), "FOREBAY_PEER_PORT"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "FOREBAY_PEER_PORT", "70000"), "FOREBAY_PEER_PORT"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "FOREBAY_PEER_PORT", "29500"), "MASTER_PORT"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "FOREBAY_PEERS", "nonsense"), "FOREBAY_PEERS"));
  EXPECT_TRUE(names(with(Torchrun(1, 2), "FOREBAY_PEERS", "a:1,a:1"), "twice"));
  EXPECT_TRUE(names(with({}, "FOREBAY_PEERS", "a:1,b:2"), "FOREBAY_NODE"));
  EXPECT_TRUE(names(with({{"FOREBAY_NODE", "2"}}, "FOREBAY_PEERS", "a:1,b:2"), "FOREBAY_NODE"));
  EXPECT_TRUE(names(with({}, "FOREBAY_PEERS", "etcd://e:1"), "FOREBAY_NODES"));
  EXPECT_FALSE(with(Torchrun(1, 2), "FOREBAY_PEERS", "etcd://").empty());
  EXPECT_FALSE(with(Torchrun(1, 2), "FOREBAY_PEERS", "etcd://e").empty());
  EXPECT_TRUE(
      names(with({{"SLURM_NNODES", "2"}, {"SLURM_NODEID", "0"}}, "SLURM_JOB_NODELIST", "n["),
            "SLURM_JOB_NODELIST"));
}

TEST(Cluster, OwnHostIsWhatReachesTheOthers) {
  ClusterSpec spec;
  spec.method = Method::kLauncher;
  spec.nodes = 2;
  spec.master = "127.0.0.1:7421";
  EXPECT_EQ(*OwnHost(spec), "127.0.0.1");
  spec.master = "localhost:7421";
  const auto host = OwnHost(spec, 10 * kSecond);
  ASSERT_TRUE(host) << host.status().message();
  EXPECT_TRUE(*host == "127.0.0.1" || *host == "::1") << *host;
  spec.method = Method::kStatic;
  spec.nodes_at = {"127.0.0.1:1", "127.0.0.2:1"};
  spec.node = 1;
  EXPECT_EQ(*OwnHost(spec), "127.0.0.2");
}

}  // namespace
}  // namespace forebay::peer
