"""One bucket in memory: packed from local tensors, reduced in place, read back."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import Lane, LaneError, Operation
from torchft_plus.process_group.operation import ended
from torchft_plus.reduce.codec import Codec
from torchft_plus.reduce.compressed import CompressedReduction
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
            elif tensor.dtype == view.dtype:
                torch.mul(tensor, weight, out=view)
            else:  # rounded once, in the wider dtype
                view.copy_(tensor).mul_(weight)
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


class CompressedBucket(StagedBucket):
    """A bucket of float32 that is summed through a codec, its flags exactly.

    Args:
        bucket: of float32, whatever its tensors are.
        codec: for the values.
        last: no bucket follows it in its step.
        error_feedback: add to each step's input what encoding took away in the last committed one.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, codec: Codec, last: bool, error_feedback: bool
    ) -> None:
        super().__init__(bucket, device)
        self._codec = codec
        self._last = last
        self._error_feedback = error_feedback
        self._contributes = False
        self._absent: list[slice] = []
        self._residual: torch.Tensor | None = None
        self._reduction: CompressedReduction | None = None

    def pack(self, tensors: list[torch.Tensor | None], weight: float, absent: float = 0) -> None:
        """As for any bucket, and add the residual where there is a tensor. The same input in each attempt of a step."""
        super().pack(tensors, weight, absent)
        self._contributes = weight != 0
        self._absent = []
        if not self._contributes:
            return
        values = self._memory()[: self.bucket.flags_offset]
        if self._residual is not None:
            values.add_(self._residual)
        for slot, tensor in zip(self.bucket.slots, tensors, strict=True):
            if tensor is None:
                place = slice(slot.offset, slot.offset + slot.elements)
                self._absent.append(place)
                values[place] = absent

    def post(self, lane: Lane, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
        """Start the reduction, which is a sum."""
        assert op == ReduceOp.SUM, "a codec knows sums only"
        flags = self.bucket.elements - self.bucket.flags_offset
        keep_error = self._error_feedback and self._contributes
        self._reduction = CompressedReduction(
            lane, self._codec, self._memory(), flags, self._last, keep_error
        )
        self.operation = self._user = self._reduction

    def commit(self) -> None:
        """The step is committed: from now on its residual counts, not the one before it."""
        error = None if self._reduction is None else self._reduction.rounding_error
        if error is None:
            return
        if self._residual is not None:
            for place in self._absent:  # it was not part of the input
                error[place] += self._residual[place]
        # An infinite input has no residual; kept, it would spoil every step to come.
        self._residual = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._reduction = None

    def forget(self) -> None:
        """This group has become another one's copy: what it had not sent is no longer its own."""
        self._residual = None
