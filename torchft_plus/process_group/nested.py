"""Process groups around a process group, under torchft's names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import Backend, Capabilities, Lane, LaneError, LaneSpec, Operation
from torchft_plus.process_group.operation import ended
from torchft_plus.process_group.posting_order import Place
from torchft_plus.process_group.works import FinishedWork, SwallowingWork
from torchft_plus.process_group.wrappers import ProcessGroup, Tensors


class ProcessGroupWrapper(ProcessGroup):
    """Hands everything to another process group.

    Args:
        timeout: accepted for torchft's sake: the inner group has its own.
        pg: the inner group.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: ProcessGroup | None = None) -> None:
        super().__init__(timeout)
        if pg is None:
            raise ValueError("pg is None: pass the process group to be wrapped")
        self._pg = pg
        self.backend_name = pg.backend_name

    @property
    def parent(self) -> ProcessGroup:
        """The inner group."""
        return self._pg

    def set_timeout(self, timeout: timedelta) -> None:
        """See ``ProcessGroup``; of the inner group."""
        super().set_timeout(timeout)
        if hasattr(self, "_pg"):
            self._pg.set_timeout(timeout)

    def backend(self) -> Backend:
        """The inner group's."""
        return self._pg.backend()

    @property
    def lane(self) -> Lane | None:
        """The inner group's."""
        return self._pg.lane

    def install(self, lane: Lane) -> None:
        """See ``ProcessGroup``; in the inner group."""
        self._pg.install(lane)

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """See ``ProcessGroup``; the inner group's."""
        self._pg.configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )

    def abort(self, errored: bool = True) -> None:
        """See ``ProcessGroup``; the inner group's."""
        self._pg.abort(errored)

    def errored(self) -> Exception | None:
        """The inner group's."""
        return self._pg.errored()

    def shutdown(self) -> None:
        """See ``ProcessGroup``; the inner group's."""
        self._pg.shutdown()

    def size(self) -> int:
        """The inner group's."""
        return self._pg.size()

    def rank(self) -> int:
        """The inner group's."""
        return self._pg.rank()

    def getBackendName(self) -> str:
        """The inner group's."""
        return self._pg.getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg!r})"

    def _run(self, call: Callable[[], Any], tensors: Sequence[Any]) -> Any:
        """Start a collective of the inner group; ``tensors`` are what its future will hold."""
        del tensors
        return call()

    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        return self._run(lambda: self._pg.allreduce(tensors, opts), tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        return self._run(lambda: self._pg.allreduce_coalesced(tensors, opts), tensors)

    def allgather(self, output_tensors: list[Tensors], input_tensor: Tensors, opts: Any) -> Any:
        return self._run(lambda: self._pg.allgather(output_tensors, input_tensor, opts), output_tensors)

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any
    ) -> Any:
        return self._run(
            lambda: self._pg.allgather_into_tensor_coalesced(output_tensors, input_tensors, opts),
            output_tensors,
        )

    def alltoall_base(
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any,
    ) -> Any:
        return self._run(
            lambda: self._pg.alltoall_base(
                output_buffer, input_buffer, output_split_sizes, input_split_sizes, opts
            ),
            [output_buffer],
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._run(lambda: self._pg.barrier(opts), [])

    def broadcast(self, tensor_list: Tensors, opts: Any) -> Any:
        return self._run(lambda: self._pg.broadcast(tensor_list, opts), tensor_list)

    def recv(self, tensors: Tensors, src_rank: int, tag: int) -> Any:
        return self._run(lambda: self._pg.recv(tensors, src_rank, tag), tensors)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Any:
        return self._run(lambda: self._pg.reduce_scatter(output_tensors, input_tensors, opts), output_tensors)

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any
    ) -> Any:
        return self._run(
            lambda: self._pg.reduce_scatter_tensor_coalesced(output_tensors, input_tensors, opts),
            output_tensors,
        )

    def send(self, tensors: Tensors, dst_rank: int, tag: int) -> Any:
        return self._run(lambda: self._pg.send(tensors, dst_rank, tag), tensors)


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Reports failures of collectives instead of raising them; after one, nothing is sent until ``configure``.

    A Manager needs none: it does so by itself.

    Args:
        pg: the inner group.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._first_error: Exception | None = None

    def configure(self, store_addr: str, *arguments: Any, **named: Any) -> None:
        """See ``ProcessGroup``; forgets the error."""
        self._first_error = None
        super().configure(store_addr, *arguments, **named)

    def error(self) -> Exception | None:
        """The first failure since ``configure``."""
        return self._first_error

    def report_error(self, e: Exception) -> None:
        """Take note of a failure."""
        self._first_error = self._first_error or e

    def _run(self, call: Callable[[], Any], tensors: Sequence[Any]) -> Any:
        if self._first_error is not None:
            return FinishedWork(tensors)
        try:
            return SwallowingWork([call()], tensors, self.report_error)
        except Exception as error:  # noqa: BLE001 - to swallow it is what this class is for
            self.report_error(error)
            return FinishedWork(tensors)


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Fails on demand, in a Manager too: for tests.

    Args:
        pg: the inner group.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._lock = threading.Lock()
        self._pending: Exception | None = None

    def report_future_error(self, e: Exception) -> None:
        """The next reduction fails with ``e``."""
        with self._lock:
            self._pending = e

    def take_error(self) -> Exception | None:
        """What ``report_future_error`` was told, once."""
        with self._lock:
            error, self._pending = self._pending, None
            return error

    def backend(self) -> Backend:
        """The inner group's, with lanes that fail on demand."""
        return _FailingBackend(self._pg.backend(), self.take_error)

    def _run(self, call: Callable[[], Any], tensors: Sequence[Any]) -> Any:
        error = self.take_error()
        return call() if error is None else FinishedWork(tensors, error)


class _FailingBackend:
    """Makes lanes whose operations fail when ``take_error`` gives an error."""

    def __init__(self, inner: Backend, take_error: Callable[[], Exception | None]) -> None:
        self._inner = inner
        self._take_error = take_error

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def create(self, spec: LaneSpec) -> Lane:
        return _FailingLane(self._inner.create(spec), self._take_error)


class _FailingLane:
    """A lane that breaks when ``take_error`` gives an error."""

    def __init__(self, inner: Lane, take_error: Callable[[], Exception | None]) -> None:
        self._inner = inner
        self._take_error = take_error

    @property
    def spec(self) -> LaneSpec:
        return self._inner.spec

    @property
    def error(self) -> LaneError | None:
        return self._inner.error

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Operation:
        return self._broken() or self._inner.allreduce(tensor, op)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Operation:
        return self._broken() or self._inner.all_to_all(output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, place: Place | None = None) -> Operation:
        return self._broken() or self._inner.all_gather(output, input, place)

    def reserve(self, last: bool) -> Place:
        return self._inner.reserve(last)

    def process_group(self) -> Any:
        return self._inner.process_group()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def retire(self) -> None:
        self._inner.retire()

    def _broken(self) -> Operation | None:
        error = self._take_error()
        if error is None:
            return None
        self._inner.abort(str(error))
        return ended(LaneError(str(error)))
