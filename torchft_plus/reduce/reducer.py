"""Gradients of one step, reduced over the replicas while backward goes on."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter

from torchft_plus.process_group.lane import Lane, Operation
from torchft_plus.reduce.codec import Codec
from torchft_plus.reduce.layout import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, plan
from torchft_plus.reduce.local_tensors import gradient_entry, local_gradient, local_part, set_gradient
from torchft_plus.reduce.model_buffers import ModelBuffers
from torchft_plus.reduce.readiness import Readiness
from torchft_plus.reduce.reduction import AttachedReduction, Posted
from torchft_plus.reduce.staging import CompressedBucket, StagedBucket
from torchft_plus.reduce.streams import streams_for

logger = logging.getLogger(__name__)


class GradientReducer:
    """The ``Reduction`` of a model's gradients.

    Local gradients (of a DTensor: the local shard) are packed into flat buckets and summed over the replicas. Hooks only count,
    and launch buckets in their fixed order when they are full; whatever they have not launched, ``post`` does. ``.grad``
    keeps the local gradient until the step is committed, so that everything can be posted again.

    For each parameter a presence flag travels along: a gradient that nobody had stays None everywhere, one that
    somebody had exists everywhere afterwards.

    Args:
        parameters: names and parameters in order of registration, the same on every replica. Frozen and repeated
            (tied) ones are left out.
        bucket_bytes: size of a bucket.
        first_bucket_bytes: size of the first one.
        check_finite: look for infinities and NaNs in the local gradients; costs one pass over them.
        buffers: names and tensors that a forward changes and that are reduced with the step.
        local_buffers: the same, but kept local: only put back if the step is refused.
        codec: sum gradients in fewer bytes (``codec.codec("int8")``); counts, weights and buffers stay exact. A lone replica's
            gradient stays as it is: nothing is sent. Staging is float32 then.
        error_feedback: add to each step's gradients what the codec took away in the last committed one. Takes memory of
            one float32 copy of the gradients, two while a step is reduced.

    Raises:
        ValueError: nothing to reduce, a tensor of a dtype that cannot be reduced, or error feedback without a codec.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        check_finite: bool = False,
        buffers: Sequence[tuple[str, torch.Tensor]] = (),
        local_buffers: Sequence[tuple[str, torch.Tensor]] = (),
        codec: Codec | None = None,
        error_feedback: bool = False,
    ) -> None:
        if error_feedback and codec is None:
            raise ValueError("error_feedback is set without a codec: nothing is lost that could be fed back")
        self._parameters = _distinct(parameters)
        if not self._parameters:
            raise ValueError("parameters holds no trainable parameter: pass what the optimizer gets")
        entries = [gradient_entry(name, parameter) for name, parameter in self._parameters]
        self._dtypes = [entry.dtype for entry in entries]
        if codec is not None:
            entries = [replace(entry, dtype=torch.float32) for entry in entries]
        self._layout = plan(entries, bucket_bytes, first_bucket_bytes)
        self._codec = codec
        self._error_feedback = error_feedback
        self._check_finite = check_finite
        self._lock = threading.Lock()
        self._device = local_part(self._parameters[0][1].detach()).device
        self._streams = streams_for(self._device)
        self._buckets = [self._staged(bucket) for bucket in self._layout.buckets]
        self._readiness = Readiness(self._layout.bucket_of, len(self._buckets))
        self._buffers = ModelBuffers(buffers, local_buffers)
        self._buffer_operations: tuple[Operation, ...] | None = None
        self._marks: list[list[Any]] = [[] for _ in self._buckets]
        self._predecessor: AttachedReduction | None = None
        self._lane: Lane | None = None
        self._weight = 1.0
        self._last_total_weight = 0.0
        self._next = 0
        self._again = self._stale = self._held = self._in_step = False
        self._hook_failure: Exception | None = None
        for index, (_, parameter) in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._fired, index))
        logger.info(
            "gradients are averaged in %d buckets; their staging takes %d bytes on %s",
            len(self._buckets),
            self._layout.size_bytes + self._buffers.layout.size_bytes,
            self._device,
        )

    @property
    def staging_bytes(self) -> int:
        """Memory that staging takes besides the local gradients."""
        return self._layout.size_bytes + self._buffers.layout.size_bytes

    # --- Reduction -----------------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Digest of the layout and of the codec: equal on all replicas."""
        both = f"{self._layout.digest} {self._buffers.layout.digest}"
        if self._codec is not None:
            dtypes = " ".join(map(str, self._dtypes))
            both = f"{both} {self._codec.name} {self._codec.block} {self._error_feedback} {dtypes}"
        return hashlib.sha256(both.encode()).hexdigest()[:16]

    def begin(self, lane: Lane | None, weight: float) -> None:
        """A step starts; or, within one, the weight changes and everything is to be posted again."""
        with self._lock:
            if not self._in_step:
                self._buffers.save()
            self._in_step = True
            self._weight = weight
            self._readiness.begin()
            self._streams.begin()
            self._restart(lane)

    def post(self, lane: Lane) -> Posted:
        """Post what hooks have not posted on this very lane; everything, if it is another one or after ``again``.

        Raises:
            ValueError: a gradient cannot be reduced (sparse, or in another layout than its parameter).
        """
        with self._lock:
            if self._hook_failure is not None:
                raise self._hook_failure
            if self._predecessor is not None:
                self._predecessor.post(lane)
            if lane is not self._lane or self._again:
                self._restart(lane)
            self._readiness.learn()
            if _alone(lane):
                return Posted((), finite=self._is_finite_locally())
            self._launch(len(self._buckets))
            if self._buffer_operations is None:
                self._buffer_operations = self._buffers.post(lane, self._weight)
            operations = tuple(staged.operation for staged in self._buckets) + self._buffer_operations
            return Posted(operations, stale=self._stale, finite=self._is_finite())

    def again(self) -> None:
        """The next ``post`` posts everything again."""
        self._again = True

    @torch.no_grad()
    def write_back(self, total_weight: float) -> None:
        """Averages replace the local gradients, and exist where somebody had one; buffers likewise."""
        self._in_step = False
        if self._lane is None or _alone(self._lane):
            return
        scale = 1 / total_weight
        for staged in self._buckets:
            flags = staged.flags()
            for slot, view, contributors in zip(staged.bucket.slots, staged.views(), flags, strict=True):
                name, parameter = self._parameters[slot.index]
                gradient = local_gradient(name, parameter)
                if contributors == 0:
                    parameter.grad = None
                elif gradient is None:
                    set_gradient(parameter, (view * scale).to(self._dtypes[slot.index]))
                else:
                    torch.mul(view, scale, out=gradient)
            if isinstance(staged, CompressedBucket):
                staged.commit()
        self._last_total_weight = total_weight
        self._buffers.write_back(total_weight)

    def discard(self) -> None:
        """Drop the local gradients; buffers become what they were before the step."""
        if self._in_step:
            self._buffers.restore()
        self._in_step = False
        for _, parameter in self._parameters:
            parameter.grad = None

    # --- order on the lane -------------------------------------------------------------------------------------------

    def follow(self, predecessor: AttachedReduction) -> None:
        """Post nothing of a step before ``predecessor`` has posted everything of it: see ``AttachedReduction``."""
        self._predecessor = predecessor

    def is_posted(self) -> bool:
        """True if everything of this step has been posted."""
        if self._lane is not None and _alone(self._lane):
            return True
        return self._next == len(self._buckets) and self._buffer_operations is not None

    def may_post(self) -> bool:
        """True once this step's inputs are there: it has had a backward, or there will be none (weight 0)."""
        return self._weight == 0 or self._readiness.any_fired()

    # --- for its owner ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Backward has ended: post all buckets now, unless more backwards are expected in this step."""
        with self._lock:
            if self._lane is not None and not self._held and self._readiness.as_often_as_learned():
                self._guarded_launch(len(self._buckets))

    @contextmanager
    def held(self) -> Generator[None]:
        """Within the block hooks only count: more micro-batches follow."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def reduced_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Names and parameters, as given; frozen and repeated ones left out."""
        return self._parameters

    def caught_up(self) -> None:
        """Write the last step's reduced buffers once more, after a fetched older state has replaced them.

        What this group had not sent yet (error feedback) belonged to the state that was replaced, and is dropped.
        """
        for staged in self._buckets:
            if isinstance(staged, CompressedBucket):
                staged.forget()
        if self._last_total_weight:
            self._buffers.write_back(self._last_total_weight)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _fired(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient; on whatever thread. Must not raise: backward would lose gradients."""
        del parameter
        if self._streams.capturing():
            return
        with self._lock:
            bucket = self._readiness.fired(index)
            if bucket < self._next:
                self._stale = True
                return
            self._marks[bucket].append(self._streams.mark())
            if not self._held:
                self._guarded_launch(self._readiness.first_unready(self._next))

    def _guarded_launch(self, end: int) -> None:
        lane = self._lane
        if lane is None or lane.error is not None or self._hook_failure is not None or _alone(lane):
            return
        if self._predecessor is not None and not self._predecessor.is_posted():
            return
        try:
            self._launch(end)
        except Exception as error:  # noqa: BLE001 - told by post(), on the training thread
            self._hook_failure = error

    @torch.no_grad()
    def _launch(self, end: int) -> None:
        """Pack and post the buckets up to ``end``, in their order."""
        lane = self._lane
        assert lane is not None
        while self._next < end:
            staged = self._buckets[self._next]
            if lane.error is not None:
                staged.refuse(lane.error)
            else:
                marks = [*self._marks[self._next], self._streams.mark()]
                with self._streams.packing(marks):
                    staged.pack(self._gradients(staged), self._weight)
                    if self._check_finite:
                        staged.note_extremes()
                    staged.post(lane)
            self._next += 1

    def _gradients(self, staged: StagedBucket) -> list[torch.Tensor | None]:
        if self._weight == 0:
            return []
        return [local_gradient(*self._parameters[slot.index]) for slot in staged.bucket.slots]

    def _restart(self, lane: Lane | None) -> None:
        self._lane = lane
        self._next = 0
        self._again = self._stale = False
        self._buffer_operations = None
        self._hook_failure = None
        self._marks = [[] for _ in self._buckets]

    def _is_finite(self) -> bool:
        if not self._check_finite:
            return True
        with self._streams.packing([]):
            return all(staged.is_finite() for staged in self._buckets)

    def _is_finite_locally(self) -> bool:
        if not self._check_finite:
            return True
        gradients = (local_gradient(*named) for named in self._parameters)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)

    def _staged(self, bucket: Bucket) -> StagedBucket:
        device = self._device_of(bucket.slots[0].index)
        if self._codec is None:
            return StagedBucket(bucket, device)
        last = bucket is self._layout.buckets[-1]
        return CompressedBucket(bucket, device, self._codec, last, self._error_feedback)

    def _device_of(self, index: int) -> torch.device:
        return local_part(self._parameters[index][1].detach()).device


def _alone(lane: Lane) -> bool:
    """A lone replica's average is its own gradient, bit for bit."""
    return lane.spec.world_size == 1


def _distinct(parameters: Sequence[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    seen: set[int] = set()
    distinct: list[tuple[str, Parameter]] = []
    for name, parameter in parameters:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            distinct.append((name, parameter))
    return distinct
