// How much memory this process may take.
#pragma once

#include <cstdint>
#include <string>

namespace forebay {

struct MemoryLimit {
  uint64_t available = 0;  // MemAvailable of the node
  uint64_t cgroup = 0;  // the tightest limit of this process's cgroups, less what they use; 0: none
  uint64_t usable() const { return cgroup != 0 && cgroup < available ? cgroup : available; }
};

// `root` is "" but for tests, which lay out their own /proc and /sys below it.
MemoryLimit ReadMemoryLimit(const std::string& root = "");

// The default budget: half of what is usable, divided by the ranks on this node
// (LOCAL_WORLD_SIZE, SLURM_NTASKS_PER_NODE, OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS).
uint64_t DefaultBudget();

// Ranks of this job on this node; 1 when no launcher says otherwise.
uint64_t LocalRanks();
// This process serves all ranks of the node: LocalRanks() is 1 from now on.
void ServeAllRanks();

}  // namespace forebay
