"""A sampler for PyTorch's DataLoader whose ranks take most samples where they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from . import _forebay
from ._errors import ArgumentError
from ._internal import ranks


class LocalitySampler:
    """``torch.utils.data.DistributedSampler`` whose ranks exchange samples within a global batch.

    Every step of all ranks together takes exactly the samples that DistributedSampler gives with
    the same seed and epoch; each rank gets as many as before, most of them from its own node. The
    order is that of ``forebay.DataLoader(locality=True)``.

    Args:
        dataset: Anything with a length.
        batch_size: Of a rank: what its DataLoader has. Ranks exchange within one global batch.
        num_replicas, rank: Default: from torchrun, SLURM or MPI; else 0 of 1.
        shuffle, seed, drop_last: As for DistributedSampler.
        ranks_per_node: Rank r runs on node r // ranks_per_node. Default: as the launcher says.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        ranks_per_node: int | None = None,
    ) -> None:
        self.rank, self.num_replicas = ranks.resolve(rank, num_replicas)
        self.size = len(dataset)
        self.batch_size = int(batch_size)
        self.shuffle = bool(shuffle)
        self.seed = int(seed)
        self.drop_last = bool(drop_last)
        if ranks_per_node is None:
            ranks_per_node = ranks.ranks_per_node(self.num_replicas)
        self.ranks_per_node = int(ranks_per_node)
        self.epoch = 0
        self.start = 0
        for name in ("batch_size", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """The next pass is this epoch, from global position ``start`` on (samples of all ranks that
        were consumed before: a multiple of the global batch).
        """
        if start % self.num_replicas:
            raise ArgumentError(
                f"start is {start}, which {self.num_replicas} ranks cannot continue from"
            )
        self.epoch, self.start = int(epoch), int(start)

    def __iter__(self) -> Iterator[int]:
        order = _forebay.epoch_order(
            self.size,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
            rank=self.rank,
            world=self.num_replicas,
            drop_last=self.drop_last,
            start=self.start,
            exchange=self.batch_size,
            ranks_per_node=self.ranks_per_node,
        )
        return iter(order.tolist())

    def __len__(self) -> int:
        total = _forebay.epoch_total(self.size, self.num_replicas, self.drop_last)
        return max(total - self.start, 0) // self.num_replicas
