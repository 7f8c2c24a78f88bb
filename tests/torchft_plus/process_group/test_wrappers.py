from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    HashStore,
    ReduceScatterOptions,
    TCPStore,
)
from torch.distributed import ReduceOp

from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import LaneError, LaneSpec
from torchft_plus.process_group.wrappers import ProcessGroup, ProcessGroupDummy, ProcessGroupGloo


def _on_all(groups: list[ProcessGroup], act: Callable[[int, ProcessGroup], Any]) -> list[Any]:
    """``act`` on each group at once, one thread each; exceptions are results."""
    results: list[Any] = [None] * len(groups)

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, groups[rank])
        except Exception as error:  # noqa: BLE001 - a result like any other
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def _configured(size: int, store: TCPStore, prefix: str, timeout_s: float = 10) -> list[ProcessGroup]:
    groups: list[ProcessGroup] = [ProcessGroupGloo(timeout=timedelta(seconds=timeout_s)) for _ in range(size)]
    _configure(groups, store, prefix)
    return groups


def _configure(groups: list[ProcessGroup], store: TCPStore, prefix: str) -> None:
    address = f"127.0.0.1:{store.port}/{prefix}"
    results = _on_all(groups, lambda rank, group: group.configure(address, f"r{rank}", rank, len(groups)))
    assert results == [None] * len(groups)


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _options(op: Any) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = op
    return options


def test_every_collective_works_on_the_current_lane(store: TCPStore) -> None:
    groups = _configured(2, store, "all")
    full = lambda value, size=2: torch.full((size,), float(value))  # noqa: E731

    def collectives(rank: int, group: ProcessGroup) -> dict[str, list[float]]:
        results: dict[str, torch.Tensor] = {}

        def wait(name: str, work: Any, tensor: torch.Tensor) -> None:
            work.wait()
            results[name] = tensor

        t = full(rank + 1)
        wait("sum", group.allreduce([t], _options(ReduceOp.SUM)), t)
        t = full(rank + 1)
        wait("average", group.allreduce([t], ReduceOp.AVG), t)
        t = full(rank + 1)
        wait("coalesced", group.allreduce_coalesced([full(1), t], AllreduceCoalescedOptions()), t)
        parts = [full(0), full(0)]
        wait("allgather", group.allgather([parts], [full(rank)], AllgatherOptions()), parts[1])
        t = full(0, 4)
        wait("into", group.allgather_into_tensor_coalesced([t], [full(rank)], AllgatherOptions()), t)
        t = full(0)
        wait("alltoall", group.alltoall_base(t, full(rank), [], [], AllToAllOptions()), t)
        wait("barrier", group.barrier(BarrierOptions()), full(0))
        t = full(rank)
        wait("broadcast", group.broadcast_one(t, root=1), t)
        t = full(0)
        chunks = [full(1), full(2)]
        wait("scatter", group.reduce_scatter([t], [chunks], ReduceScatterOptions()), t)
        t = full(0)
        both = torch.tensor([1.0, 1.0, 2.0, 2.0])
        wait("scatter_tensor", group.reduce_scatter_tensor_coalesced([t], [both], ReduceScatterOptions()), t)
        t = full(rank + 5)
        wait("send_recv", group.send([t], 1, 3) if rank == 0 else group.recv([t], 0, 3), t)
        return {name: tensor.tolist() for name, tensor in results.items()}

    first, second = _on_all(groups, collectives)
    assert first == {
        "sum": [3.0] * 2,
        "average": [1.5] * 2,
        "coalesced": [3.0] * 2,
        "allgather": [1.0] * 2,
        "into": [0.0, 0.0, 1.0, 1.0],
        "alltoall": [0.0, 1.0],
        "barrier": [0.0] * 2,
        "broadcast": [1.0] * 2,
        "scatter": [2.0] * 2,
        "scatter_tensor": [2.0] * 2,
        "send_recv": [5.0] * 2,
    }
    assert second == {**first, "scatter": [4.0] * 2, "scatter_tensor": [4.0] * 2}
    assert [(group.size(), group.rank()) for group in groups] == [(2, 0), (2, 1)]
    assert groups[0].getBackendName() == "torchft_plus-gloo"
    for group in groups:
        group.shutdown()
        assert group.size() == 1


def test_after_an_abort_operations_raise_until_the_next_configure(store: TCPStore) -> None:
    groups = _configured(2, store, "abort-1")
    tensor = torch.ones(2)
    work = groups[0].allreduce([tensor], ReduceOp.SUM)
    future = work.get_future()
    assert groups[0].errored() is None
    groups[0].abort()
    with pytest.raises(LaneError, match=r"abort\(\) was called"):
        work.wait()
    assert work.is_completed() and not work.is_success()
    with pytest.raises(LaneError):
        future.wait()
    assert isinstance(groups[0].errored(), LaneError)
    with pytest.raises(LaneError):
        groups[0].allreduce([tensor], ReduceOp.SUM)
    with pytest.raises(LaneError):
        groups[0].barrier()
    deadline = time.monotonic() + 5
    while groups[1].errored() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert groups[1].errored() is not None  # the peer has noticed, though it had nothing pending
    old = groups[0].lane
    _configure(groups, store, "abort-2")
    assert groups[0].lane is not old and groups[0].errored() is None
    results = _on_all(groups, lambda rank, group: group.allreduce([torch.ones(1)], ReduceOp.SUM).wait())
    assert results == [True, True]
    for group in groups:
        group.shutdown()


def test_a_wait_has_its_own_deadline(store: TCPStore) -> None:
    groups = _configured(2, store, "wait")
    work = groups[0].allreduce([torch.ones(1)], ReduceOp.SUM)
    with pytest.raises(LaneError, match=r"did not end within 0.05 s"):
        work.wait(timedelta(milliseconds=50))
    for group in groups:
        group.shutdown()


def test_an_installed_lane_stays_its_owner_s(store: TCPStore) -> None:
    group = ProcessGroupGloo()
    lanes = [group.backend().create(LaneSpec(HashStore(), 0, 1, number, 1000)) for number in (1, 2)]
    group.install(lanes[0])
    assert group.lane is lanes[0]
    group.install(lanes[1])
    group.shutdown()
    assert lanes[0].error is None and lanes[1].error is None
    address = f"127.0.0.1:{store.port}/own"
    group.configure(address, "r0", 0, 1)
    own = group.lane
    group.install(lanes[0])
    assert own is not None and own.error is not None  # made by configure: retired


def test_a_dummy_is_alone_and_at_once() -> None:
    group = ProcessGroupDummy(0, 1)
    group.configure("nowhere", "r", 0, 1)
    tensor = torch.ones(2)
    assert group.allreduce([tensor], ReduceOp.AVG).wait()
    group.broadcast_one(tensor, root=0).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert (group.size(), group.rank(), group.getBackendName()) == (1, 0, "torchft_plus-dummy")
    group.shutdown()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="timeout is"):
        ProcessGroupGloo(timeout=timedelta(0))
    for address in ("localhost", "localhost/prefix", "host:port/prefix", ":1/prefix"):
        with pytest.raises(ValueError, match="host:port/prefix"):
            ProcessGroupGloo().configure(address, "r", 0, 1)
    with pytest.raises(LaneError, match=r"configure\(\) the process group"):
        ProcessGroupGloo().allreduce([torch.ones(1)], ReduceOp.SUM)
    assert isinstance(ProcessGroupGloo().backend(), GlooBackend)
