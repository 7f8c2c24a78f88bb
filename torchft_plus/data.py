"""Sampling for replica groups, under torchft's names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler as TorchSampler


class DistributedSampler(TorchSampler[Any]):
    """Splits a dataset over all ranks of all replica groups, whether they are there or not.

    Which batches a group that is away would have taken is not made up for: data positions that are committed with the
    step (``Manager.finish_step(positions=...)``) do that.

    Args:
        dataset: with a length.
        replica_rank: number of this replica group.
        num_replica_groups: how many there are at most.
        group_rank: rank inside the group; default: of the default process group.
        num_replicas: ranks of a group; default: as many as the default process group has.
        kwargs: for torch's ``DistributedSampler``.
    """

    def __init__(
        self,
        dataset: Any,
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        group_rank = dist.get_rank() if group_rank is None else group_rank
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.global_rank = num_replicas * replica_rank + group_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)
