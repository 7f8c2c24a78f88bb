"""Buffers that a forward changes (BatchNorm statistics, counters): reduced with the step, or kept local."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import Lane, Operation
from torchft_plus.reduce.layout import Entry, Layout, plan
from torchft_plus.reduce.local_tensors import REDUCIBLE, local_part
from torchft_plus.reduce.staging import StagedBucket

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})


class ModelBuffers:
    """A step's buffers: floats become the weighted mean over the contributors, integers and bools the maximum.

    A step that is refused leaves no trace in them, reduced or not.

    Args:
        reduced: names and tensors that all replicas are to share.
        local: names and tensors that are only put back after a refused step.

    Raises:
        ValueError: a tensor of ``reduced`` has a dtype that has neither mean nor maximum.
    """

    def __init__(
        self, reduced: Sequence[tuple[str, torch.Tensor]], local: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        self._reduced = [local_part(tensor) for _, tensor in reduced]
        self._all = self._reduced + [local_part(tensor) for _, tensor in local]
        self._saved: list[torch.Tensor] = []
        entries = [_entry(name, tensor) for (name, _), tensor in zip(reduced, self._reduced, strict=True)]
        self.layout: Layout = plan(entries, flags=False)
        self._buckets = [
            StagedBucket(bucket, self._device_of(bucket.slots[0].index)) for bucket in self.layout.buckets
        ]
        self._weight = 1.0

    @torch.no_grad()
    def save(self) -> None:
        """Remember all buffers as they are before the forward."""
        if not self._saved:
            self._saved = [tensor.clone() for tensor in self._all]
            return
        for saved, tensor in zip(self._saved, self._all, strict=True):
            saved.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what ``save`` remembered."""
        for saved, tensor in zip(self._saved, self._all, strict=False):
            tensor.copy_(saved)

    @torch.no_grad()
    def post(self, lane: Lane, weight: float) -> tuple[Operation, ...]:
        """Post all of them on ``lane``."""
        for staged in self._buckets:
            tensors: list[torch.Tensor | None] = [self._reduced[slot.index] for slot in staged.bucket.slots]
            if staged.bucket.dtype in REDUCIBLE:
                staged.pack(tensors, weight)
                staged.post(lane)
            else:
                least = torch.iinfo(staged.bucket.dtype).min
                staged.pack(tensors, 1 if weight > 0 else 0, absent=least)
                staged.post(lane, ReduceOp.MAX)
        return tuple(staged.operation for staged in self._buckets)

    @torch.no_grad()
    def write_back(self, total_weight: float) -> None:
        """Results replace the buffers."""
        for staged in self._buckets:
            for slot, view in zip(staged.bucket.slots, staged.views(), strict=True):
                if staged.bucket.dtype in REDUCIBLE:
                    torch.mul(view, 1 / total_weight, out=self._reduced[slot.index])
                else:
                    self._reduced[slot.index].copy_(view)

    def _device_of(self, index: int) -> torch.device:
        return self._reduced[index].device


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
    if dtype not in REDUCIBLE and dtype not in _INTEGERS:
        raise ValueError(f"buffer {name} has dtype {tensor.dtype}, which cannot be reduced: declare it local")
    return Entry(name, tuple(tensor.shape), dtype, tensor.device.type)
