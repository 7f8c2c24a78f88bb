"""The one interface between training and a communication backend.

A *lane* is the communicators of one quorum on one rank: rank r of every replica group is in one lane. A *backend* makes
lanes; to support another library is to write one more backend file. Nothing here imports a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import ReduceOp, Store

if TYPE_CHECKING:
    from torchft_plus.process_group.posting_order import Place


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """What a backend needs to build a lane."""

    store: Store
    """Already prefixed for this quorum and group rank."""
    rank: int
    world_size: int
    quorum_id: int
    timeout_ms: int
    """Deadline of every operation."""
    name: str = ""
    build_timeout_ms: int | None = None
    """Deadline of the build, if it is another one."""


class LaneError(RuntimeError):
    """An operation or the build of a lane failed; ``peer_rank`` is the replica rank to blame, where known."""

    def __init__(self, message: str, peer_rank: int | None = None) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank


class LaneTimeout(LaneError, TimeoutError):
    """It was not there in time: for those who catch ``TimeoutError``, as around torchft's groups in child processes."""


class Operation(Protocol):
    """A started operation. It always ends: done, or failed (by a peer, by ``Lane.abort`` or by the deadline)."""

    def poll(self) -> bool:
        """True once it has ended. Never blocks."""
        ...

    @property
    def error(self) -> LaneError | None:
        """Why it failed; None while it runs and after success."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when it has ended, on any thread, at once if it has ended already."""
        ...


class Lane(Protocol):
    """Communicators of one quorum on this rank."""

    @property
    def spec(self) -> LaneSpec: ...

    @property
    def error(self) -> LaneError | None:
        """First failure, or None. A lane with an error never works again."""
        ...

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Operation:
        """Start an in-place allreduce. Never blocks, never raises: failure is in the operation.

        The lane keeps ``tensor`` alive until the operation has ended.
        """
        ...

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Operation:
        """Start an exchange: part r of ``input`` goes to rank r, part r of ``output`` comes from it.

        As ``allreduce`` in everything else.

        Args:
            output, input: flat, of one dtype and length, which is a multiple of the world size.
        """
        ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, place: Place | None = None) -> Operation:
        """Start a gathering: ``input`` of rank r becomes part r of every ``output``.

        As ``allreduce`` in everything else.

        Args:
            output, input: flat, of one dtype; ``output`` holds ``input`` as often as there are members.
            place: where it is to be posted, if that was reserved.
        """
        ...

    def reserve(self, last: bool) -> Place:
        """A place for a second collective that depends on the first one, which was started just now.

        A lane matches collectives by order: the place is the same on every member, whenever the second is ready. It comes
        after a few first ones that follow, or, with ``last``, at once; whoever reserves must at some time reserve a last one.
        """
        ...

    def process_group(self) -> Any:
        """The raw torch process group, for collectives that only ManagedProcessGroup's users need."""
        ...

    def abort(self, reason: str) -> None:
        """End every pending operation as failed within milliseconds and let the peers notice. Any thread; repeatable."""
        ...

    def retire(self) -> None:
        """Free what the lane holds, in the background, under a deadline. Implies abort."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; asked at run time, never guessed from versions."""

    device_types: tuple[str, ...]
    aborts_in_ms: bool
    supports_avg: bool


class Backend(Protocol):
    """Makes lanes."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def create(self, spec: LaneSpec) -> Lane:
        """Build a lane, eagerly connected. Blocks up to ``spec.build_timeout_ms``, without the GIL; any thread.

        Raises:
            LaneError: a peer did not arrive or left during the build.
        """
        ...
