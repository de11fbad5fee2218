#include "common.h"
#include "core/home.h"
#include "core/sampler.h"

namespace forebay::python {

void BindPlan(nb::module_& m) {
  m.def(
      "epoch_order",
      [](uint32_t size, bool shuffle, uint64_t seed, uint64_t epoch, uint32_t rank, uint32_t world,
         bool drop_last, uint64_t start, uint32_t exchange, uint32_t ranks_per_node) {
        SamplerSpec spec{size, shuffle, seed, rank, world, drop_last, exchange, ranks_per_node};
        Raise(spec.Validate());
        std::vector<SampleId> order;
        {
          WaitUnlocked unlocked;
          order = EpochOrder(spec, epoch, start);
        }
        return Array(std::move(order));
      },
      nb::arg("size"), nb::arg("shuffle") = true, nb::arg("seed") = 0, nb::arg("epoch") = 0,
      nb::arg("rank") = 0, nb::arg("world") = 1, nb::arg("drop_last") = false, nb::arg("start") = 0,
      nb::arg("exchange") = 0, nb::arg("ranks_per_node") = 1,
      "What DistributedSampler yields for this rank, from global position `start` on; with "
      "`exchange` (a rank's batch) after the exchange of each global batch.");
  m.def(
      "homes",
      [](uint32_t size, uint32_t nodes) {
        if (nodes == 0) Raise(Status(Code::kInvalidArgument, "nodes is 0"));
        std::vector<uint32_t> homes(size);
        for (SampleId s = 0; s < size; ++s) homes[s] = HomeOf(s, nodes).node;
        return Array(std::move(homes));
      },
      nb::arg("size"), nb::arg("nodes"),
      "The node with which each sample lives while all are there and have room.");
  m.def(
      "epoch_total",
      [](uint32_t size, uint32_t world, bool drop_last) {
        SamplerSpec spec;
        spec.size = size;
        spec.world = world;
        spec.drop_last = drop_last;
        Raise(spec.Validate());
        return spec.TotalSize();
      },
      nb::arg("size"), nb::arg("world") = 1, nb::arg("drop_last") = false,
      "Samples that all ranks together see in an epoch.");
  m.def(
      "random_sampler_order",
      [](BytesIn state, uint32_t size, uint64_t num_samples, bool replacement) {
        TorchGenerator generator = Value(TorchGenerator::FromState(
            {reinterpret_cast<const std::byte*>(state.data()), state.size()}));
        return Array(Value(RandomSamplerOrder(generator, size, num_samples, replacement)));
      },
      nb::arg("state"), nb::arg("size"), nb::arg("num_samples"), nb::arg("replacement") = false,
      "What RandomSampler yields with a torch generator in this state (generator.get_state()).");
}

}  // namespace forebay::python
