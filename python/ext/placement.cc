#include "core/placement.h"

#include "common.h"

namespace forebay::python {
namespace {

using Lengths = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

PlacementRule RuleNamed(const std::string& name) {
  if (name == "frequency") return PlacementRule::kFrequency;
  if (name == "hash") return PlacementRule::kHash;
  if (name != "auto") {
    Raise(Status(Code::kInvalidArgument,
                 StrCat("no placement rule '", name, "': auto, frequency or hash")));
  }
  return PlacementRule::kAuto;
}

nb::dict Describe(Placement placement) {
  const PlacementStats stats = placement.stats();
  nb::dict out;
  out["rule"] = stats.rule == PlacementRule::kFrequency ? "frequency" : "hash";
  out["horizon"] = stats.horizon;
  out["samples"] = stats.samples;
  out["bytes"] = stats.bytes;
  out["covered_samples"] = stats.covered_samples;
  out["covered_bytes"] = stats.covered_bytes;
  out["memory_samples"] = stats.memory_samples;
  out["memory_bytes"] = stats.memory_bytes;
  out["local_accesses"] = stats.local_accesses;
  out["peak_bytes"] = stats.peak_bytes;
  out["kept_bytes"] = placement.KeptBytes();
  std::vector<std::pair<uint64_t, uint64_t>> used;
  for (const NodeTiers& node : placement.used()) used.emplace_back(node.memory, node.nvme);
  out["used"] = used;
  // The codes stay where the plan has them.
  auto* owned = new Placement(std::move(placement));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Placement*>(p); });
  out["codes"] = nb::cast(nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>(
      owned->codes().data(), {owned->codes().size()}, owner));
  return out;
}

}  // namespace

void BindPlacement(nb::module_& m) {
  m.attr("NOWHERE") = Placement::kNowhere;
  m.def(
      "plan_placement",
      [](Lengths lengths, const std::vector<std::pair<uint64_t, uint64_t>>& nodes, uint32_t world,
         uint32_t ranks_per_node, uint32_t epochs, uint64_t first_epoch, bool shuffle,
         uint64_t seed, bool drop_last, const std::string& rule) {
        if (lengths.size() > UINT32_MAX) {
          Raise(Status(Code::kInvalidArgument, "more samples than 32 bits can number"));
        }
        PlacementOptions options;
        options.sampler = {
            static_cast<uint32_t>(lengths.size()), shuffle, seed, 0, world, drop_last};
        options.first_epoch = first_epoch;
        options.epochs = epochs;
        options.ranks_per_node = ranks_per_node;
        for (const auto& [memory, nvme] : nodes) options.nodes.push_back({memory, nvme});
        options.rule = RuleNamed(rule);
        const auto plan = [&] {
          WaitUnlocked unlocked;
          return PlanPlacement(options, {lengths.data(), lengths.size()});
        };
        return Describe(Value(plan()));
      },
      nb::arg("lengths"), nb::arg("nodes"), nb::arg("world"), nb::arg("ranks_per_node") = 1,
      nb::arg("epochs") = 0, nb::arg("first_epoch") = 0, nb::arg("shuffle") = true,
      nb::arg("seed") = 0, nb::arg("drop_last") = false, nb::arg("rule") = "auto",
      "Which node and tier holds each sample. nodes: (memory bytes, NVMe bytes) of each. `codes` "
      "of\n"
      "the answer has node * 2 + tier (0: memory, 1: NVMe) for each sample, or NOWHERE; the rest\n"
      "are statistics.");
  m.def("expected_local_share", &ExpectedLocalShare, nb::arg("nodes"), nb::arg("epochs"),
        "Share of the accesses that are local when each sample lies with the node that uses it\n"
        "most.");
}

}  // namespace forebay::python
