"""torchft's process group classes on top of lanes.

The Manager installs the lane of each quorum. For direct use ``configure`` builds one from a store, as torchft does.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    HashStore,
    PrefixStore,
    ReduceScatterOptions,
    TCPStore,
)
from torch.distributed import ReduceOp

from torchft_plus.process_group.backends import backend
from torchft_plus.process_group.lane import Backend, Lane, LaneError, LaneSpec
from torchft_plus.process_group.registered import Registrable
from torchft_plus.process_group.works import OperationWork, TorchWork

Tensors = list[torch.Tensor]


class ProcessGroup(Registrable):
    """Process group between replicas whose members change: every quorum brings a new lane.

    Collectives run on the current lane, raise what torch's do, and after a failure fail until the next lane.

    Args:
        timeout: of every operation and of building a lane.
    """

    backend_name = ""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._backend: Backend | None = None
        self._lane: Lane | None = None
        self._owned = False
        self._last_quorum_id = 0
        self._lane_lock = threading.Lock()

    def set_timeout(self, timeout: timedelta) -> None:
        """From the next lane on, how long its operations and its build may take.

        Raises:
            ValueError: it is shorter than a millisecond.
        """
        self._timeout_ms = round(timeout.total_seconds() * 1000)
        if self._timeout_ms < 1:
            raise ValueError(f"timeout is {timeout}: it must be longer than a millisecond")

    def backend(self) -> Backend:
        """What makes the lanes.

        Raises:
            RuntimeError: this torch or this machine lacks it.
        """
        if self._backend is None:
            self._backend = backend(self.backend_name)
        return self._backend

    @property
    def lane(self) -> Lane | None:
        """The lane in use."""
        return self._lane

    def install(self, lane: Lane) -> None:
        """Use ``lane``, which stays the caller's, who retires it. One that ``configure`` made is retired now."""
        self._replace(lane, owned=False)

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
        """Build a lane with the peers that meet at a store, and use it; the one before it is retired.

        Args:
            store_addr: "host:port/prefix" of a TCP store; give each quorum another prefix. A numeric host saves name
                look-ups, which can cost seconds.
            replica_id: for people.
            rank, world_size: among the replicas.
            quorum_id: for people; by default one more than the last.
            group_rank, group_world_size, global_ranks: accepted for torchft's sake.

        Raises:
            ValueError: ``store_addr`` is not of that form.
            LaneError: a peer did not arrive.
        """
        del group_rank, group_world_size, global_ranks
        self._last_quorum_id = self._last_quorum_id + 1 if quorum_id is None else quorum_id
        with self._lane_lock:
            old, owned = self._lane, self._owned
        if old is not None and owned:
            old.retire()
        spec = LaneSpec(
            store=_connect_store(store_addr, self._timeout_ms),
            rank=rank,
            world_size=world_size,
            quorum_id=self._last_quorum_id,
            timeout_ms=self._timeout_ms,
            name=replica_id,
        )
        self._replace(self.backend().create(spec), owned=True)

    def _replace(self, lane: Lane | None, owned: bool) -> None:
        with self._lane_lock:
            old, old_owned = self._lane, self._owned
            self._lane, self._owned = lane, owned
        if old is not None and old_owned and old is not lane:
            old.retire()

    def abort(self, errored: bool = True) -> None:
        """End pending operations as failed, here and at the peers.

        Args:
            errored: accepted for torchft's sake: an aborted lane always says so in ``errored()``.
        """
        del errored
        if self._lane is not None:
            self._lane.abort("abort() was called")

    def errored(self) -> Exception | None:
        """The failure that broke the current lane, or None."""
        error = None if self._lane is None else self._lane.error
        return None if error is None else LaneError(f"the lane was aborted: {error}", error.peer_rank)

    def shutdown(self) -> None:
        """Give up the current lane."""
        self._replace(None, owned=False)

    def size(self) -> int:
        """Members of the current lane; 1 before the first."""
        return 1 if self._lane is None else self._lane.spec.world_size

    def rank(self) -> int:
        """Rank in the current lane; 0 before the first."""
        return 0 if self._lane is None else self._lane.spec.rank

    def getBackendName(self) -> str:
        """As torch.distributed calls for it."""
        return f"torchft_plus-{self.backend_name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # --- collectives -------------------------------------------------------------------------------------------------

    def _usable(self) -> Lane:
        if self._lane is None:
            raise LaneError("there is no lane: configure() the process group, or give it to a Manager")
        if self._lane.error is not None:
            raise self._lane.error
        return self._lane

    def _raw(self) -> Any:
        return self._usable().process_group()

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | ReduceOp.RedOpType) -> Any:
        """In place. An average is a sum that is divided afterwards, on every backend."""
        lane = self._usable()
        op = reduce_op(opts)
        average = op == ReduceOp.AVG
        operations = [lane.allreduce(tensor, ReduceOp.SUM if average else op) for tensor in tensors]

        def divide() -> None:
            for tensor in tensors:
                tensor.div_(lane.spec.world_size)

        return OperationWork(operations, tensors, divide if average else None)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions) -> Any:
        return self.allreduce(tensors, opts)

    def allgather(self, output_tensors: list[Tensors], input_tensor: Tensors, opts: AllgatherOptions) -> Any:
        return TorchWork(self._raw().allgather(output_tensors, input_tensor, opts), output_tensors)

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions
    ) -> Any:
        return TorchWork(
            self._raw().allgather_into_tensor_coalesced(output_tensors, input_tensors, opts), output_tensors
        )

    def alltoall_base(
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions,
    ) -> Any:
        work = self._raw().alltoall_base(
            output_buffer, input_buffer, output_split_sizes, input_split_sizes, opts
        )
        return TorchWork(work, [output_buffer])

    def barrier(self, opts: BarrierOptions | None = None) -> Any:
        return TorchWork(self._raw().barrier(opts or BarrierOptions()), [])

    def broadcast(self, tensor_list: Tensors, opts: BroadcastOptions) -> Any:
        return TorchWork(self._raw().broadcast(tensor_list, opts), tensor_list)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Any:
        """Broadcast one tensor from replica rank ``root``."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def recv(self, tensors: Tensors, src_rank: int, tag: int) -> Any:
        return TorchWork(self._raw().recv(tensors, src_rank, tag), tensors)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: ReduceScatterOptions
    ) -> Any:
        return TorchWork(self._raw().reduce_scatter(output_tensors, input_tensors, opts), output_tensors)

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions
    ) -> Any:
        return TorchWork(
            self._raw().reduce_scatter_tensor_coalesced(output_tensors, input_tensors, opts), output_tensors
        )

    def send(self, tensors: Tensors, dst_rank: int, tag: int) -> Any:
        return TorchWork(self._raw().send(tensors, dst_rank, tag), tensors)


class ProcessGroupGloo(ProcessGroup):
    """Between replicas over gloo: CPU tensors."""

    backend_name = "gloo"


class ProcessGroupNCCL(ProcessGroup):
    """Between replicas over NCCL, or RCCL in a ROCm build of torch: GPU tensors."""

    backend_name = "nccl"


class ProcessGroupDummy(ProcessGroup):
    """A replica that is always alone: every reduction is the input itself. For tests and first tries.

    Args:
        rank, world: what ``rank()`` and ``size()`` say.
    """

    backend_name = "gloo"

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self._dummy_rank = rank
        self._dummy_world = world
        self.configure_count = 0

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
        """Nothing to connect to."""
        del store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        self.configure_count += 1

    def size(self) -> int:
        return self._dummy_world

    def rank(self) -> int:
        return self._dummy_rank

    def getBackendName(self) -> str:
        return "torchft_plus-dummy"

    def _usable(self) -> Lane:
        if self._lane is None:
            spec = LaneSpec(HashStore(), rank=0, world_size=1, quorum_id=0, timeout_ms=self._timeout_ms)
            self._replace(self.backend().create(spec), owned=True)
        return super()._usable()


def create_store_client(store_addr: str, timeout: timedelta) -> PrefixStore:
    """A client of the TCP store at ``store_addr`` ("host:port/prefix").

    Raises:
        ValueError: ``store_addr`` is not of that form.
    """
    return _connect_store(store_addr, round(timeout.total_seconds() * 1000))


def reduce_op(options: Any) -> ReduceOp.RedOpType:
    """The plain reduction named by ``options``: torch's options object, a ReduceOp or one of its members."""
    op: Any = getattr(options, "reduceOp", options)
    return getattr(op, "op", op)


def _connect_store(address: str, timeout_ms: int) -> PrefixStore:
    location, slash, prefix = address.partition("/")
    host, colon, port = location.rpartition(":")
    if not (slash and colon and host and port.isdigit()):
        raise ValueError(f"store_addr is {address!r}: it must be of the form host:port/prefix")
    timeout = timedelta(milliseconds=timeout_ms)
    return PrefixStore(prefix, TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout))
