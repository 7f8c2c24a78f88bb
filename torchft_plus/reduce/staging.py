"""One bucket in memory: packed from local tensors, reduced in place, read back."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import Lane, LaneError, Operation
from torchft_plus.process_group.operation import ended
from torchft_plus.reduce.layout import Bucket


class StagedBucket:
    """The staging of one bucket and the operation that works on it.

    The memory is kept from step to step, but never used again while its operation runs, nor after it failed: who knows
    what still writes into it. Then there is new memory, and the lane keeps the old alive as long as it must.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self._device = device
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._extremes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._user: Operation = ended()
        """The operation that works, or last worked, on the memory."""
        self.operation: Operation = self._user
        """The operation of this attempt."""

    def pack(self, tensors: list[torch.Tensor | None], weight: float, absent: float = 0) -> None:
        """Fill the staging with ``weight`` times each tensor, ``absent`` where there is none, and the flags.

        Weight 1 multiplies nothing; weight 0 counts as if there were no tensors.
        """
        flat = self._writable()
        if weight == 0:
            flat.fill_(absent)
            flat[self.bucket.flags_offset :].zero_()
            return
        present = [tensor for tensor in tensors if tensor is not None]
        if weight == 1 and len(present) == len(tensors):
            torch._foreach_copy_(self._views, present)  # pyright: ignore[reportPrivateUsage]
            flat[self.bucket.flags_offset :].fill_(1)
            return
        for view, tensor in zip(self._views, tensors, strict=True):
            if tensor is None:
                view.fill_(absent)
            elif weight == 1:
                view.copy_(tensor)
            else:
                torch.mul(tensor, weight, out=view)
        if flat.numel() > self.bucket.flags_offset:
            flags = torch.tensor([float(tensor is not None) for tensor in tensors], dtype=flat.dtype)
            flat[self.bucket.flags_offset :].copy_(flags)

    def note_extremes(self) -> None:
        """Have the least and greatest packed value computed, for ``is_finite``."""
        packed = self._memory()[: self.bucket.flags_offset]
        self._extremes = torch.aminmax(packed) if packed.numel() else None

    def is_finite(self) -> bool:
        """Whether all that was packed before ``note_extremes`` is finite."""
        return self._extremes is None or all(bool(torch.isfinite(extreme)) for extreme in self._extremes)

    def post(self, lane: Lane, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
        """Start the reduction."""
        self.operation = self._user = lane.allreduce(self._memory(), op)

    def refuse(self, error: LaneError) -> None:
        """Do not even start: the lane is broken."""
        self.operation = ended(error)

    def flags(self) -> list[float]:
        """How many contributors had each tensor."""
        return self._memory()[self.bucket.flags_offset :].tolist()

    def views(self) -> list[torch.Tensor]:
        """The reduced tensors, in slot order."""
        return self._views

    def _memory(self) -> torch.Tensor:
        assert self._flat is not None, "pack() comes first"
        return self._flat

    def _writable(self) -> torch.Tensor:
        if self._flat is None or not self._user.poll() or self._user.error is not None:
            self._flat = torch.empty(self.bucket.elements, dtype=self.bucket.dtype, device=self._device)
            self._views = [
                self._flat[slot.offset : slot.offset + slot.elements].view(slot.shape)
                for slot in self.bucket.slots
            ]
            self._user = ended()
        return self._flat
