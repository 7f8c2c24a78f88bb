"""Reductions that a training loop asks for one by one (``Manager.allreduce``), recorded so that they can be repeated.

Each operation is kept with its input. When a peer dies, all of them are posted again on the next lane, in their order. What the
caller had waited for by then was a result of the broken quorum; the final results replace it at the commit, and
the caller is told to make of them again what it had made of the others (clip them, say): ``results_changed``.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import Lane, LaneError, Operation
from torchft_plus.process_group.operation import REDUCIBLE_DTYPES, ended
from torchft_plus.reduce.codec import Codec
from torchft_plus.reduce.compressed import CompressedReduction
from torchft_plus.reduce.local_tensors import local_part
from torchft_plus.reduce.reduction import AttachedReduction, Posted

_NO_LANE = LaneError("there is no lane yet: the operation is posted when the step is finished")


class RecordedWork(Work):
    """Handle of one recorded reduction, in torch's form. Never raises for a broken lane: the vote decides.

    ``wait`` copies the result into the tensor. If the lane is broken the tensor keeps the local input for now.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        contributes: bool,
        release: Callable[[], None],
        codec: Codec | None = None,
    ) -> None:
        super().__init__()
        self._codec = codec
        self._release = release
        self._tensor = tensor
        self._local = local_part(tensor.detach())
        self._op = op
        self._saved = self._local.clone(memory_format=torch.contiguous_format)
        self._contributes = contributes
        self._lock = threading.Lock()
        self._staging: torch.Tensor | None = None
        self._operation: Operation = ended(_NO_LANE)
        self._written_from: torch.Tensor | None = None
        """The staging whose result was written into the tensor."""
        self._seen = False
        """The caller has waited for it, with whatever outcome."""
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    # --- for the caller ----------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the reduction has ended; True if the tensor holds its result.

        Args:
            timeout: how long at most; None or zero: until the lane's own deadline.
        """
        self._release()
        over = threading.Event()
        self._operation.add_done_callback(over.set)
        over.wait(timeout.total_seconds() if timeout else None)
        self._seen = True
        return self._write()

    def is_done(self) -> bool:
        """True once it has ended, well or not."""
        return self._operation.poll()

    def is_completed(self) -> bool:
        """torch's name of ``is_done``."""
        return self._operation.poll()

    def is_success(self) -> bool:
        """True once it has ended well."""
        return self._operation.poll() and self._operation.error is None

    def exception(self) -> LaneError | None:
        """Why it failed, if it did; the vote knows."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """The tensor, in torch's form."""
        return [self._tensor]

    def get_future(self) -> Any:
        """A future of the tensor, which ends with the operation, reduced or (after a failure) not; never an error."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
        self._release()
        self._operation.add_done_callback(lambda: self._complete(future))
        return future

    # --- for RecordedOperations --------------------------------------------------------------------------------------

    def set_contributes(self, contributes: bool) -> None:
        """Whether the next posting carries the input, or the neutral element."""
        self._contributes = contributes

    @torch.no_grad()
    def post(self, lane: Lane) -> Operation:
        """Post it on ``lane`` from the saved input, into fresh staging."""
        if lane.error is not None:
            self._operation = ended(lane.error)
            return self._operation
        if self._codec is not None and lane.spec.world_size > 1:
            staging = _stage_exactly(self._saved, self._op, self._contributes)
            exact = int(self._op == ReduceOp.AVG)
            operation: Operation = CompressedReduction(lane, self._codec, staging.view(-1), exact, last=True)
        else:
            staging = _stage(self._saved, self._op, self._contributes, lane.spec.world_size)
            op = ReduceOp.SUM if self._op == ReduceOp.AVG else self._op
            operation = lane.allreduce(staging, op)
        with self._lock:
            self._staging, self._operation = staging, operation
        return operation

    def settle(self) -> bool:
        """Bring the committed result into the tensor.

        Returns:
            True if the caller had waited and was given something else. What it made of that does not matter: replicas
            that were given different things must all be told, or all would not do the same again (P1).
        """
        replaces = self._seen and self._written_from is not self._staging
        self._write()
        return replaces

    @property
    def operation(self) -> Operation:
        """The operation of the last posting."""
        return self._operation

    def description(self) -> str:
        """What must be the same on all replicas."""
        codec = "" if self._codec is None else f" {self._codec.name}"
        return f"{tuple(self._saved.shape)} {self._saved.dtype} {self._op}{codec}"

    @torch.no_grad()
    def _write(self) -> bool:
        """Copy the result of the last posting into the tensor, once."""
        with self._lock:
            staging = self._staging
            if staging is None or not self._operation.poll() or self._operation.error is not None:
                return False
            if self._written_from is not staging:
                _average(staging, self._op)
                self._local.copy_(_unstaged(staging, self._saved, self._op))
                self._written_from = staging
            return True

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        """On the thread that ended the operation."""
        self._seen = True
        self._write()
        future.set_result([self._tensor])


class RecordedOperations:
    """The ``Reduction`` of everything started by ``start`` in one step.

    All replicas must start the same reductions in the same order. Contributions are counted per operation, with the
    operation: an average is over those who really contributed, and known when ``wait`` returns.
    """

    def __init__(self) -> None:
        self._works: list[RecordedWork] = []
        self._lane: Lane | None = None
        self._contributes = True
        self._again = False
        self._released = 0
        """So many of the works are posted on the lane."""
        self._predecessor: AttachedReduction | None = None
        self.results_changed = False
        """The last commit replaced a result that the caller had waited for."""

    def follow(self, predecessor: AttachedReduction) -> None:
        """Post nothing of a step before ``predecessor`` has posted everything of it: see ``AttachedReduction``.

        What is started earlier than that is posted, with all of the predecessor's, when somebody waits for it after
        the backward, or when the step is finished.
        """
        self._predecessor = predecessor

    def start(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, codec: Codec | None = None
    ) -> RecordedWork:
        """Reduce ``tensor`` (of a DTensor: the local shard) in place over the contributors of the quorum.

        Args:
            tensor: dense; its content is copied now, and replaced by the result in ``wait`` or at the commit.
            op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
            codec: sum or average a floating tensor in fewer bytes.

        Raises:
            ValueError: ``op`` is another one, does not fit the dtype or the codec, or averages integers.
        """
        _check(tensor, op, codec)
        work = RecordedWork(tensor, op, self._contributes, self._release, codec)
        self._works.append(work)
        if self._predecessor is None or self._predecessor.is_posted():
            self._release()
        return work

    def is_empty(self) -> bool:
        """Nothing was started in this step."""
        return not self._works

    # --- Reduction -----------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """What a step reduces is up to the caller's loop: nothing to compare."""
        return hashlib.sha256(b"recorded operations").hexdigest()[:16]

    def begin(self, lane: Lane | None, weight: float) -> None:
        """A step starts; or, within one, this group's contribution is taken back (weight 0) or changed."""
        self.results_changed = False
        self._lane = lane
        self._contributes = weight > 0
        for work in self._works:
            work.set_contributes(self._contributes)
        self._again = bool(self._works)
        self._released = 0

    def post(self, lane: Lane) -> Posted:
        """Post what ``start`` has not posted on this very lane."""
        if self._predecessor is not None:
            self._predecessor.post(lane)
        if lane is not self._lane or self._again:
            self._lane, self._again, self._released = lane, False, 0
        self._post_rest(lane)
        return Posted(tuple(work.operation for work in self._works))

    def again(self) -> None:
        """The next ``post`` posts everything again."""
        self._again = True

    def write_back(self, total_weight: float) -> None:
        """Results replace what the tensors hold, unless it is the same; sets ``results_changed``."""
        del total_weight
        settled = [work.settle() for work in self._works]
        self.results_changed = any(settled)
        self._end()

    def discard(self) -> None:
        """The step was refused; the tensors are the caller's and stay as they are."""
        self._end()

    def _release(self) -> None:
        """Somebody waits, or all is free to go: post what is started, as far as the order allows."""
        lane = self._lane
        if lane is None or self._again or self._released == len(self._works):
            return
        if self._predecessor is not None and not self._predecessor.is_posted():
            if not self._predecessor.may_post():
                return
            self._predecessor.post(lane)
        self._post_rest(lane)

    def _post_rest(self, lane: Lane) -> None:
        for work in self._works[self._released :]:
            work.post(lane)
        self._released = len(self._works)

    def _end(self) -> None:
        self._works = []
        self._released = 0
        self._lane = None
        self._again = False


_NEUTRAL: dict[ReduceOp.RedOpType, Callable[[torch.dtype], float | int]] = {
    ReduceOp.SUM: lambda dtype: 0,
    ReduceOp.AVG: lambda dtype: 0,
    ReduceOp.PRODUCT: lambda dtype: 1,
    ReduceOp.MAX: lambda dtype: float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min,
    ReduceOp.MIN: lambda dtype: float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max,
    ReduceOp.BAND: lambda dtype: -1 if torch.iinfo(dtype).min < 0 else torch.iinfo(dtype).max,
    ReduceOp.BOR: lambda dtype: 0,
    ReduceOp.BXOR: lambda dtype: 0,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def _check(tensor: torch.Tensor, op: ReduceOp.RedOpType, codec: Codec | None) -> None:
    if codec is not None and (op not in (ReduceOp.SUM, ReduceOp.AVG) or not tensor.is_floating_point()):
        raise ValueError(
            f"a quantised {op.name if op in _NEUTRAL else op} of {tensor.dtype} is not offered: "
            "quantise sums and averages of floating tensors"
        )
    if op not in _NEUTRAL:
        known = ", ".join(one.name for one in _NEUTRAL)
        raise ValueError(f"reduce_op is {op}, which cannot be repeated among survivors: use one of {known}")
    if tensor.dtype not in REDUCIBLE_DTYPES:
        raise ValueError(
            f"the tensor is {tensor.dtype}, which not every backend reduces: cast it to one that is"
        )
    floating = tensor.is_floating_point()
    if op == ReduceOp.AVG and not floating:
        raise ValueError(
            f"the average of {tensor.dtype} is not a {tensor.dtype}: use a sum, or a floating tensor"
        )
    if op in _BITWISE and floating:
        raise ValueError(f"reduce_op is {op.name} on {tensor.dtype}: it needs integers")
    if tensor.layout != torch.strided:
        raise ValueError(f"the tensor is {tensor.layout}: reduce a dense one")


def _stage(saved: torch.Tensor, op: ReduceOp.RedOpType, contributes: bool, world_size: int) -> torch.Tensor:
    """The input or the neutral element; an average is followed by the number of contributors.

    That number travels in the same dtype, and so exactly: bfloat16 counts to 256, then float32 takes over.
    """
    if op != ReduceOp.AVG:
        return saved.clone() if contributes else torch.full_like(saved, _NEUTRAL[op](saved.dtype))
    exact = world_size <= 2 / torch.finfo(saved.dtype).eps
    dtype = saved.dtype if exact else torch.float32
    staging = torch.zeros(saved.numel() + 1, dtype=dtype, device=saved.device)
    if contributes:
        staging[:-1].copy_(saved.view(-1))
        staging[-1] = 1
    return staging


def _stage_exactly(saved: torch.Tensor, op: ReduceOp.RedOpType, contributes: bool) -> torch.Tensor:
    """For a codec: the input in float32, or zeros; an average is followed by the number of contributors."""
    average = op == ReduceOp.AVG
    staging = torch.zeros(saved.numel() + average, dtype=torch.float32, device=saved.device)
    if contributes:
        staging[: saved.numel()].copy_(saved.view(-1))
        staging[saved.numel() :].fill_(1)
    return staging if average else staging.view(saved.shape)


def _average(staging: torch.Tensor, op: ReduceOp.RedOpType) -> None:
    """Divide by the number of contributors, once."""
    if op == ReduceOp.AVG:
        contributors = float(staging[-1])
        staging[:-1].div_(max(1.0, contributors))  # without contributors it is zero already


def _unstaged(staging: torch.Tensor, like: torch.Tensor, op: ReduceOp.RedOpType) -> torch.Tensor:
    return staging[:-1].view(like.shape) if op == ReduceOp.AVG else staging
