"""Lanes over gloo.

What gloo (torch 2.13) does not offer, and how it is made here:

- abort: by shutting down the group's own connections (``gloo_sockets``); pending operations then end within
  milliseconds, also at the peers. gloo's ``abort`` and ``shutdown`` do nothing.
- a failure seen by all: a killed peer fails only the operations of its ring neighbours, so a lane aborts
  itself at its first failure, and when one of its connections breaks.
- waiting without blocking: outcomes come through the future's callback; ``Work.wait`` cannot be interrupted.
- averages: sum and divide (pytorch issue 162338).
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, HashStore, Store
from torch.distributed import AllreduceOptions, ProcessGroupGloo, ReduceOp

from torchft_plus.process_group.bind import bind_address
from torchft_plus.process_group.deadline import DeadlineExceeded, call_within, run_in_background
from torchft_plus.process_group.dispatch import as_process_group
from torchft_plus.process_group.gloo_sockets import Endpoint, GroupSockets, find_sockets, parse_listener
from torchft_plus.process_group.lane import Capabilities, Lane, LaneError, LaneSpec, LaneTimeout
from torchft_plus.process_group.local import LocalLane
from torchft_plus.process_group.operation import LaneOperation, check_arguments, check_exchange, ended
from torchft_plus.process_group.posting_order import Place, PostingOrder

logger = logging.getLogger(__name__)

_BUILD_GRACE_MS = 500
"""gloo keeps the deadline of a build itself; only a store that hangs needs the outer one."""
_BROKEN_GRACE_S = 0.05
"""A peer that has all its results may leave while this rank still reads its own; longer it is missing."""
_EXIT_S = 2.0
"""Patience of a process that ends; destroying a group takes 10 ms."""


class _Group:
    """What must outlive a lane until it can be destroyed: the torch group and duplicates of its connections.

    The last reference is always dropped by a retirement thread: the destructor joins gloo's threads, and our
    callbacks run on one of them.
    """

    def __init__(self, group: Any, sockets: GroupSockets, spec: LaneSpec) -> None:
        self.group: Any = group
        self.dispatch: Any = None
        self.sockets = sockets
        self.spec = spec
        self.disconnected = threading.Event()
        self.destroyed = threading.Event()
        self._retired = False
        self.watcher: threading.Thread | None = None
        with _live_groups_lock:
            _live_groups.add(self)

    def disconnect(self) -> None:
        """Pending operations fail, here and at the peers. Repeatable."""
        if not self.disconnected.is_set():
            self.disconnected.set()
            self.sockets.shut_down()

    def retire(self) -> None:
        """Disconnect, and destroy in the background. Repeatable."""
        self.disconnect()
        with _live_groups_lock:
            first, self._retired = not self._retired, True
        if first:
            run_in_background(self.spec.timeout_ms, self._destroy, f"retire gloo lane {self.spec.quorum_id}")

    def _destroy(self) -> None:
        """Blocks until gloo's operations have ended: 10 ms after ``disconnect``, else up to their timeout."""
        self.dispatch = None
        self.group = None
        if self.watcher is not None:
            self.watcher.join()
        self.sockets.close()
        with _live_groups_lock:
            _live_groups.discard(self)
        self.destroyed.set()


_live_groups: set[_Group] = set()
_live_groups_lock = threading.Lock()


def _leave_to_parent() -> None:
    """In a forked child no group is ours to end, and none may be destroyed: its threads are not here."""
    for group in _live_groups:
        group.sockets.leave_to_parent()
        group.disconnected.set()
        _inherited.append(group)
    _live_groups.clear()


_inherited: list[_Group] = []
os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _retire_all() -> None:
    """A process that ends must neither wait for frozen peers nor have gloo's threads call into a dead interpreter."""
    with _live_groups_lock:
        groups = list(_live_groups)
    for group in groups:
        group.retire()
    deadline = time.monotonic() + _EXIT_S
    for group in groups:
        group.destroyed.wait(max(0.0, deadline - time.monotonic()))


class GlooLane:
    """A lane over one gloo group. Made by ``GlooBackend.create``."""

    def __init__(self, group: _Group) -> None:
        self._spec = group.spec
        self._group = group
        self._lock = threading.Lock()
        self._error: LaneError | None = None
        self._pending: set[LaneOperation] = set()
        self._order = PostingOrder()
        self._retire_once = weakref.finalize(self, group.retire)
        self._retire_once.atexit = False
        if len(group.sockets):
            name = f"watch gloo lane {group.spec.quorum_id}"
            group.watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self), group), name=name, daemon=True
            )
            group.watcher.start()

    @property
    def spec(self) -> LaneSpec:
        return self._spec

    @property
    def error(self) -> LaneError | None:
        """First failure, or None. A lane with an error never works again."""
        return self._error

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> LaneOperation:
        """Start an in-place allreduce of ``tensor`` (CPU, contiguous).

        Raises:
            ValueError: such an ``op`` or ``tensor`` cannot be reduced (the caller's bug, not the lane's failure).
        """
        check_arguments(tensor, op, "gloo", "cpu")
        options = AllreduceOptions()
        options.reduceOp = op  # pyright: ignore[reportAttributeAccessIssue]  # torch's stub is wrong
        return self._order.post(
            lambda: self._start(lambda group: group.allreduce([tensor], options), (tensor,))
        )

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> LaneOperation:
        """Start an exchange of equal parts of CPU tensors.

        Raises:
            ValueError: the tensors cannot be exchanged.
        """
        check_exchange(output, input, 1, self._spec.world_size, "cpu")
        options = AllToAllOptions()
        return self._order.post(
            lambda: self._start(
                lambda group: group.alltoall_base(output, input, [], [], options), (output, input)
            )
        )

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, place: Place | None = None
    ) -> LaneOperation:
        """Start a gathering of CPU tensors.

        Raises:
            ValueError: the tensors cannot be gathered.
        """
        check_exchange(output, input, self._spec.world_size, self._spec.world_size, "cpu")
        options = AllgatherOptions()

        def start() -> LaneOperation:
            return self._start(lambda group: group._allgather_base(output, input, options), (output, input))

        return self._order.post(start) if place is None else place.take(start)

    def reserve(self, last: bool) -> Place:
        """A place for the ``all_gather`` that depends on what was started just now."""
        return self._order.reserve(last)

    def _start(self, call: Callable[[Any], Any], tensors: tuple[torch.Tensor, ...]) -> LaneOperation:
        """Have gloo start what ``call`` makes of the group; only ``PostingOrder`` may call this."""
        with self._lock:
            error, group = self._error, self._group.group
            operation = LaneOperation(*tensors)
            if error is None and group is not None:
                self._pending.add(operation)
        if error is not None or group is None:
            return ended(error or LaneError("the lane is retired"))
        try:
            future = call(group).get_future()
        except RuntimeError as failure:
            self._end(operation, LaneError(f"gloo did not start the operation: {failure}"))
            return operation
        lane: weakref.ref[GlooLane] = weakref.ref(self)
        future.add_done_callback(lambda done: _hear(lane, operation, done))
        return operation

    def process_group(self) -> Any:
        """The gloo group as a ``torch.distributed.ProcessGroup``. Do not keep it beyond the lane.

        Raises:
            LaneError: the lane is broken or retired.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._group.dispatch is None:
                self._group.dispatch = as_process_group(self._group.group, "GLOO", "cpu")
            return self._group.dispatch

    def abort(self, reason: str) -> None:
        """End every pending operation as failed within milliseconds and let the peers notice.

        Any thread; repeatable.
        """
        self._break(LaneError(reason))

    def retire(self) -> None:
        """Destroy the group on a background thread. Implies abort."""
        self.abort("the lane is retired")
        self._retire_once()

    def _break(self, error: LaneError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            unreachable = list(self._pending) if not len(self._group.sockets) else []
        self._group.disconnect()
        self._order.abandon()
        for operation in unreachable:
            # Without connections to shut down, gloo ends them at its own timeout and keeps their tensors.
            self._end(operation, error)

    def _end(self, operation: LaneOperation, failure: LaneError | None) -> None:
        with self._lock:
            self._pending.discard(operation)
            first = self._error
        if failure is not None and first is None:
            failure = LaneError(str(failure), self._group.sockets.broken_peer())
            self._break(failure)
        operation.finish(failure if failure is None else self._error or failure)


def _watch(lane_reference: weakref.ref[GlooLane], group: _Group) -> None:
    """Ends with the connections: each way to give a lane up shuts them down."""
    group.sockets.wait_broken()
    group.disconnected.wait(_BROKEN_GRACE_S)
    lane = lane_reference()
    if lane is not None and not group.disconnected.is_set():
        peer = group.sockets.broken_peer()
        who = "a replica" if peer is None else f"replica rank {peer}"
        lane._break(LaneError(f"{who} has closed its connection", peer))  # pyright: ignore[reportPrivateUsage]


def _brief(error: Exception) -> str:
    """gloo's error in one clause: without the place in its source and its advice."""
    first = str(error).split("\n", 1)[0]
    return "gloo: " + re.sub(r"^\[[^\]]*\]\s*", "", first).split(". This is typically", 1)[0]


def _hear(
    lane_reference: weakref.ref[GlooLane], operation: LaneOperation, future: torch.futures.Future[Any]
) -> None:
    """Runs on gloo's thread when the operation has ended."""
    failure: LaneError | None = None
    try:
        future.value()
    except Exception as error:  # noqa: BLE001 - gloo's errors have no common type; every one means the operation failed
        failure = LaneError(_brief(error))
    lane = lane_reference()
    if lane is None:
        operation.finish(failure)
    else:
        lane._end(operation, failure)  # pyright: ignore[reportPrivateUsage]


class GlooBackend:
    """Makes gloo lanes.

    Args:
        host: local address to bind to; by default ``TORCHFT_PLUS_BIND``, else the one from which the store is
            reached.
    """

    def __init__(self, host: str | None = None) -> None:
        self._host = host

    @property
    def name(self) -> str:
        return "gloo"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(device_types=("cpu",), aborts_in_ms=True, supports_avg=False)

    def create(self, spec: LaneSpec) -> Lane:
        """Build a lane, all peers connected. Blocks up to its deadline, without the GIL; any thread.

        Raises:
            LaneTimeout: a peer did not arrive in time; says who, where the store knows.
            LaneError: a peer left during the build.
        """
        if spec.world_size == 1:
            return LocalLane(spec, lambda: _alone(spec, self._host or "127.0.0.1"))
        host = self._host or bind_address(spec.store)
        timeout_ms = spec.build_timeout_ms or spec.timeout_ms
        started_s = time.monotonic()
        try:
            group = call_within(
                timeout_ms + _BUILD_GRACE_MS,
                lambda: _build(spec, host),
                f"build gloo lane {spec.quorum_id}",
                discard=_Group.retire,
            )
        except DeadlineExceeded as error:
            raise LaneTimeout(f"{error}: the store of the lane does not answer") from error
        except (
            Exception
        ) as error:  # torch raises RuntimeError and its own types for store and connection failures
            late = time.monotonic() - started_s >= timeout_ms / 1000
            missing = _missing_ranks(spec)
            detail = f"; not there: replica rank {', '.join(map(str, missing))}" if missing else ""
            peer_rank = missing[0] if len(missing) == 1 else None
            lane = f"the gloo lane of quorum {spec.quorum_id}"
            if late:
                text = f"{lane} timed out after {timeout_ms / 1000:g} seconds{detail} ({error})"
                raise LaneTimeout(text, peer_rank) from error
            raise LaneError(f"{lane} could not be built{detail} ({error})", peer_rank) from error
        return GlooLane(group)


def _build(spec: LaneSpec, host: str) -> _Group:
    group = _connect(spec.store, spec, host)
    listeners = _listeners(spec)
    sockets = find_sockets(listeners, spec.rank) if listeners is not None else GroupSockets(())
    if not len(sockets):
        logger.warning(
            "lane %d: no connections of gloo found; an abort will not reach the peers before their timeout",
            spec.quorum_id,
        )
    return _Group(group, sockets, spec)


def _connect(store: Store, spec: LaneSpec, host: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timedelta(milliseconds=spec.build_timeout_ms or spec.timeout_ms)
    group: Any = ProcessGroupGloo(store, spec.rank, spec.world_size, options)
    group._set_default_timeout(timedelta(milliseconds=spec.timeout_ms))
    return group


def _alone(spec: LaneSpec, host: str) -> Any:
    return as_process_group(_connect(HashStore(), spec, host), "GLOO", "cpu")


def _listeners(spec: LaneSpec) -> dict[int, Endpoint] | None:
    listeners: dict[int, Endpoint] = {}
    for rank in range(spec.world_size):
        endpoint = parse_listener(spec.store.get(_key(rank)))
        if endpoint is None:
            return None
        listeners[rank] = endpoint
    return listeners


def _missing_ranks(spec: LaneSpec) -> list[int]:
    """Ranks that have not published their address; empty if the store cannot be asked."""

    def ask() -> list[int]:
        return [rank for rank in range(spec.world_size) if not spec.store.check([_key(rank)])]

    try:
        return call_within(_BUILD_GRACE_MS, ask, "ask the store")
    except (DeadlineExceeded, RuntimeError):
        return []


def _key(rank: int) -> str:
    return f"0/{rank}"
