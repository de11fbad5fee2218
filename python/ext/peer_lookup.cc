#include "base/clock.h"
#include "base/rng.h"
#include "common.h"
#include "control/etcd_store.h"
#include "core/directory.h"

namespace forebay::python {
namespace {

// Look-ups that one reading of the clock is spread over.
constexpr size_t kGroup = 64;

// Nanoseconds of a look-up, the mean of each group.
std::vector<double> TimeLocate(uint32_t samples, uint32_t nodes, size_t groups, uint64_t seed) {
  constexpr uint32_t kBytes = 110 << 10;
  peer::Directory directory(0, std::vector<uint32_t>(samples, kBytes));
  peer::View view;
  view.version = 1;
  view.nodes = nodes;
  for (uint32_t node = 0; node < nodes; ++node) {
    peer::Member member;
    member.node = node;
    member.incarnation = node + 1;
    member.memory = uint64_t{samples} * kBytes * 12 / 10 / nodes;
    view.members.push_back(member);
  }
  directory.OnView(view);
  // Some copies elsewhere, as when replicas have been made.
  SplitMix64 rng(seed);
  for (uint32_t i = 0; i < samples / 10 && nodes > 1; ++i) {
    directory.OnGot(1 + static_cast<uint32_t>(rng.Below(nodes - 1)),
                    static_cast<SampleId>(rng.Below(samples)));
  }
  std::vector<double> out(groups);
  std::vector<SampleId> asked(kGroup);
  uint64_t sum = 0;
  for (double& took : out) {
    for (SampleId& sample : asked) sample = static_cast<SampleId>(rng.Below(samples));
    const Nanos start = SteadyClock().Now();
    for (const SampleId sample : asked) {
      const peer::Found found = directory.Locate(sample);
      sum += found.home ^ found.holder;
    }
    took = static_cast<double>(SteadyClock().Now() - start) / kGroup;
  }
  volatile uint64_t sink = sum;  // the look-ups have a use
  static_cast<void>(sink);
  return out;
}

// Microseconds of each: what it costs to ask a metadata service instead.
Result<std::vector<double>> TimeEtcd(const std::string& endpoint, size_t keys, size_t lookups,
                                     uint64_t seed) {
  control::EtcdOptions options;
  options.endpoints = {endpoint};
  const auto store = control::EtcdStore::Make(options);
  if (!store) return store.error();
  // All of one length, as a range takes what begins with it.
  const auto key = [](uint64_t number) {
    return "/forebay/bench/" + std::to_string(uint64_t{1000000} + number);
  };
  for (size_t i = 0; i < keys; ++i) {
    if (Status put = (*store)->Put(key(i), "node 0"); !put.ok()) return put;
  }
  SplitMix64 rng(seed);
  std::vector<double> out(lookups);
  for (double& took : out) {
    const std::string asked = key(rng.Below(keys));
    const Nanos start = SteadyClock().Now();
    const auto found = (*store)->Range(asked);
    took = static_cast<double>(SteadyClock().Now() - start) * 1e-3;
    if (!found) return found.error();
    if (found->entries.empty()) return Status(Code::kNotFound, asked + " is not in etcd");
  }
  return out;
}

}  // namespace

void BindPeerLookup(nb::module_& m) {
  m.def("time_locate", &TimeLocate, nb::arg("samples"), nb::arg("nodes"), nb::arg("groups"),
        nb::arg("seed") = 0, nb::call_guard<WaitUnlocked>(),
        "Nanoseconds that finding a sample's node takes, the mean of each group of 64.");
  m.def(
      "time_etcd_lookups",
      [](const std::string& endpoint, size_t keys, size_t lookups, uint64_t seed) {
        const auto run = [&] {
          WaitUnlocked unlocked;
          return TimeEtcd(endpoint, keys, lookups, seed);
        };
        if (keys == 0) Raise(Status(Code::kInvalidArgument, "a look-up needs a key"));
        return Value(run());
      },
      nb::arg("endpoint"), nb::arg("keys"), nb::arg("lookups"), nb::arg("seed") = 0,
      "Microseconds of each look-up of one of `keys` keys in etcd.");
}

}  // namespace forebay::python
