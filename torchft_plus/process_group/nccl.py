"""Lanes over NCCL, and over RCCL, which torch's ROCm builds offer under the same names.

How it differs from gloo: an operation's future completes when it is *enqueued*, so a small poller asks for the events of the
running ones; communicators are non-blocking, so that they can be aborted; an abort or a set-up may hang, so each
runs on a thread of its own under a deadline; and nothing here waits on a stream, which could not be interrupted.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, HashStore, Store
from torch.distributed import AllreduceOptions, ReduceOp

from torchft_plus.process_group.deadline import DeadlineExceeded, call_within, run_in_background
from torchft_plus.process_group.dispatch import as_process_group
from torchft_plus.process_group.lane import Capabilities, Lane, LaneError, LaneSpec
from torchft_plus.process_group.local import LocalLane
from torchft_plus.process_group.operation import LaneOperation, check_arguments, check_exchange, ended
from torchft_plus.process_group.posting_order import Place, PostingOrder, Start

logger = logging.getLogger(__name__)

WATCHDOG_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Without these torch's own watchdog ends the process after an abort or a timeout. Read when a group is made."""

_POLL_S = 0.0002
_IDLE_S = 1.0
_EXIT_S = 2.0
_environment_lock = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """An operation, the torch work behind it, the memory that it uses, and when it must have ended."""

    operation: LaneOperation
    work: Any
    tensors: tuple[torch.Tensor, ...]
    deadline: float


_lost: list[tuple[Any, list[_Running]]] = []
"""Groups whose abort hung: their kernels may still write, so nothing of them is ever freed."""


class NcclLane:
    """A lane over one NCCL group. Made by ``NcclBackend.create``; its poller runs until it is aborted or retired."""

    def __init__(self, spec: LaneSpec, group: Any, abort_timeout_ms: int, device_type: str) -> None:
        self._spec = spec
        self._device_type = device_type
        self._group: Any = group
        self._abort_timeout_ms = abort_timeout_ms
        self._lock = threading.Lock()
        self._in_library = threading.Lock()
        """No call may be inside the communicator when it is aborted."""
        self._wake = threading.Event()
        self._running: list[_Running] = []
        self._order = PostingOrder()
        self._error: LaneError | None = None
        self._over = threading.Event()
        _live_lanes.add(self)
        name = f"poll nccl lane {spec.quorum_id}"
        threading.Thread(target=self._poll, name=name, daemon=True).start()

    @property
    def spec(self) -> LaneSpec:
        return self._spec

    @property
    def error(self) -> LaneError | None:
        """First failure, or None. A lane with an error never works again."""
        return self._error

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> LaneOperation:
        """Enqueue an in-place allreduce of ``tensor`` behind the current stream.

        Raises:
            ValueError: such an ``op`` or ``tensor`` cannot be reduced (the caller's bug, not the lane's failure).
        """
        check_arguments(tensor, op, "nccl", self._device_type)
        options = AllreduceOptions()
        options.reduceOp = op  # pyright: ignore[reportAttributeAccessIssue]  # torch's stub is wrong
        start = self._starter(lambda group: group.allreduce([tensor], options), (tensor,))
        return self._order.post(start)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> LaneOperation:
        """Enqueue an exchange of equal parts behind the current stream.

        Raises:
            ValueError: the tensors cannot be exchanged.
        """
        check_exchange(output, input, 1, self._spec.world_size, self._device_type)
        options = AllToAllOptions()
        start = self._starter(
            lambda group: group.alltoall_base(output, input, [], [], options), (output, input)
        )
        return self._order.post(start)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, place: Place | None = None
    ) -> LaneOperation:
        """Enqueue a gathering behind the current stream.

        Raises:
            ValueError: the tensors cannot be gathered.
        """
        check_exchange(output, input, self._spec.world_size, self._spec.world_size, self._device_type)
        options = AllgatherOptions()
        start = self._starter(lambda group: group._allgather_base(output, input, options), (output, input))
        return self._order.post(start) if place is None else place.take(start)

    def reserve(self, last: bool) -> Place:
        """A place for the ``all_gather`` that depends on what was started just now."""
        return self._order.reserve(last)

    def _starter(self, call: Callable[[Any], Any], tensors: tuple[torch.Tensor, ...]) -> Start:
        """What enqueues ``call``, on whatever thread its turn comes: always behind the stream that is current now."""
        if self._device_type != "cuda":
            return lambda: self._start(call, tensors)
        stream = torch.cuda.current_stream(tensors[0].device)

        def start() -> LaneOperation:
            with torch.cuda.stream(stream):
                return self._start(call, tensors)

        return start

    def _start(self, call: Callable[[Any], Any], tensors: tuple[torch.Tensor, ...]) -> LaneOperation:
        if self._error is not None:  # without waiting for an abort that hangs in the library
            return ended(self._error)
        operation = LaneOperation(*tensors)
        failure = ""
        with self._in_library:
            if self._error is not None:
                return ended(self._error)
            try:
                work = call(self._group)
            except RuntimeError as error:
                failure = f"nccl did not start the operation: {error}"
            else:
                deadline = time.monotonic() + self._spec.timeout_ms / 1000
                with self._lock:
                    self._running.append(_Running(operation, work, tensors, deadline))
        if failure:
            self.abort(failure)
            return ended(self._error)
        self._wake.set()
        return operation

    def process_group(self) -> Any:
        """The NCCL group as a ``torch.distributed.ProcessGroup``. Do not keep it beyond the lane.

        Raises:
            LaneError: the lane is aborted or retired.
        """
        if self._error is not None:
            raise self._error
        return as_process_group(self._group, "NCCL", self._device_type)

    def abort(self, reason: str) -> None:
        """Abort the communicator on a thread of its own; pending operations end as failed when that is done.

        Never blocks; any thread; repeatable.
        """
        self._break(LaneError(reason))

    def retire(self) -> None:
        """Abort, which frees the group, in the background."""
        self.abort("the lane is retired")

    def wait_over(self, timeout_s: float) -> bool:
        """Wait until an abort is done and every operation has ended."""
        return self._over.wait(timeout_s)

    def _break(self, error: LaneError) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._wake.set()
        self._order.abandon()
        name = f"abort nccl lane {self._spec.quorum_id}"
        run_in_background(2 * self._abort_timeout_ms, lambda: self._abort_group(error, name), name)

    def _abort_group(self, error: LaneError, name: str) -> None:
        """Kernels end with the abort; only then may the buffers be touched again."""
        group, self._group = self._group, None
        free = self._in_library.acquire(timeout=self._abort_timeout_ms / 1000)
        try:
            call_within(self._abort_timeout_ms, group.abort, f"{name} (library)")
        except DeadlineExceeded:
            # Lost to this process are the communicator and its tensors, and only they: a new lane can be built.
            logger.error("%s hangs; its memory is not freed (%s)", name, error)
            _lost.append((group, list(self._running)))
        except RuntimeError as failure:
            logger.warning("%s: %s", name, failure)
        finally:
            if free:
                self._in_library.release()
        with self._lock:
            running, self._running = self._running, []
        for one in running:
            one.operation.finish(error)
        self._over.set()

    def _poll(self) -> None:
        """Look at the events of running operations until the lane breaks."""
        while self._error is None:
            with self._lock:
                running = list(self._running)
            if not running:
                self._wake.wait(_IDLE_S)
                self._wake.clear()
                continue
            failure = self._look(running)
            if failure is not None:
                self._break(failure)
            else:
                self._wake.wait(_POLL_S)

    def _look(self, running: list[_Running]) -> LaneError | None:
        now = time.monotonic()
        for one in running:
            with self._in_library:
                if self._error is not None:
                    return None
                over = one.work.is_completed()
                well = over and one.work.is_success()
            if over and not well:
                return LaneError(f"nccl: {one.work.exception()}")
            if over:
                with self._lock:
                    if one in self._running:  # an abort may have ended it since
                        self._running.remove(one)
                one.operation.finish()
            elif now > one.deadline:
                return LaneError(f"an operation did not end within {self._spec.timeout_ms} ms")
        return None


_live_lanes: weakref.WeakSet[NcclLane] = weakref.WeakSet()


@atexit.register
def _retire_all() -> None:
    """A process that ends must not have threads inside the library."""
    lanes = list(_live_lanes)
    for lane in lanes:
        lane.retire()
    for lane in lanes:
        lane.wait_over(_EXIT_S)


class NcclBackend:
    """Makes NCCL lanes; ``rccl`` is the same on a ROCm build of torch.

    Args:
        name: "nccl" or "rccl".
        abort_timeout_ms: how long the library may take to abort a communicator.
        make_group: builds the connected raw group; tests put a double here, for tensors of
        device_type: where the tensors are.

    Raises:
        RuntimeError: this torch or this machine has no such backend.
    """

    def __init__(
        self,
        name: str = "nccl",
        *,
        abort_timeout_ms: int = 10_000,
        make_group: Callable[[LaneSpec], Any] | None = None,
        device_type: str = "cuda",
    ) -> None:
        self._device_type = device_type
        self._name = name
        self._abort_timeout_ms = abort_timeout_ms
        if make_group is None:
            _check_available(name)
            device = torch.device("cuda", torch.cuda.current_device())
            make_group = lambda spec: _connect(spec.store, spec, device)  # noqa: E731
        self._make_group = make_group

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(device_types=(self._device_type,), aborts_in_ms=False, supports_avg=False)

    def create(self, spec: LaneSpec) -> Lane:
        """Build a lane, all peers connected. Blocks up to its deadline, without the GIL; any thread.

        Raises:
            LaneError: a peer did not arrive or left during the build, or the library hangs.
        """
        if spec.world_size == 1:
            alone = LaneSpec(HashStore(), 0, 1, spec.quorum_id, spec.timeout_ms)
            return LocalLane(
                spec, lambda: as_process_group(self._make_group(alone), "NCCL", self._device_type)
            )
        name = f"build {self._name} lane {spec.quorum_id}"
        try:
            group = call_within(
                spec.build_timeout_ms or spec.timeout_ms,
                lambda: self._make_group(spec),
                name,
                discard=lambda late: late.abort(),
            )
        except DeadlineExceeded as error:
            raise LaneError(f"{error}: a peer did not arrive, or the library hangs") from error
        except Exception as error:  # torch has several types for store and connection failures
            text = f"the {self._name} lane of quorum {spec.quorum_id} could not be built ({error})"
            raise LaneError(text) from error
        return NcclLane(spec, group, self._abort_timeout_ms, self._device_type)


def _check_available(name: str) -> None:
    hip = getattr(torch.version, "hip", None)
    if name == "rccl" and hip is None:
        raise RuntimeError("backend rccl needs a ROCm build of torch, which this is not: use nccl or gloo")
    if not torch.distributed.is_nccl_available():
        raise RuntimeError(f"backend {name} is not built into this torch: install a GPU build, or use gloo")
    if not torch.cuda.is_available():
        raise RuntimeError(f"backend {name} needs a GPU, and torch sees none on this machine: use gloo")


def _connect(store: Store, spec: LaneSpec, device: torch.device) -> Any:
    """A connected group: made, and proven by one tiny operation."""
    from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]

    torch.cuda.set_device(device)
    options: Any = ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = timedelta(milliseconds=spec.timeout_ms)
    with _environment_lock:
        before = {key: os.environ.get(key) for key in WATCHDOG_ENVIRONMENT}
        os.environ.update(WATCHDOG_ENVIRONMENT)
        try:
            group: Any = ProcessGroupNCCL(store, spec.rank, spec.world_size, options)
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
    group.eager_connect_single_device(device)
    work = group.allreduce([torch.zeros(1, device=device)], AllreduceOptions())
    while not work.is_completed():
        threading.Event().wait(_POLL_S)
    if not work.is_success():
        raise RuntimeError(str(work.exception()))
    return group
