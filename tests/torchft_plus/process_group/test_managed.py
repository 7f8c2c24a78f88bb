from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import HashStore
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from torchft_plus.process_group.managed import ManagedProcessGroup


class LateWork:
    """Ends after a while on another thread, multiplies by 10, or fails."""

    def __init__(self, tensor: torch.Tensor, failure: Exception | None, future_fails: bool = False) -> None:
        self._tensor = tensor
        self._failure = failure
        self._future_fails = future_fails
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._ended = threading.Event()
        timer = threading.Timer(0.05, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        if self._failure is None:
            self._tensor.mul_(10)
            self._future.set_result([self._tensor])
        else:
            self._future.set_exception(self._failure)  # type: ignore[arg-type]
        self._ended.set()

    def wait(self, timeout: Any = None) -> bool:
        self._ended.wait(10)
        if self._failure is not None:
            raise self._failure
        return True

    def get_future(self) -> Any:
        if self._future_fails:
            raise RuntimeError("no future")
        return self._future


class FakeManager:
    def __init__(self, failure: Exception | None = None, start: Exception | None = None, **how: Any) -> None:
        self.failure = failure
        self.start = start
        self.how = how
        self.ops: list[Any] = []
        self.errors: list[Exception] = []
        self.participants = 3
        self.own_rank: int | None = 2

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any = ReduceOp.AVG) -> LateWork:
        if self.start is not None:
            raise self.start
        self.ops.append(reduce_op)
        return LateWork(tensor, self.failure, **self.how)

    def report_error(self, e: Exception) -> None:
        self.errors.append(e)

    def expect_reductions(self) -> None:
        self.told = True

    def num_participants(self) -> int:
        return self.participants

    def participating_rank(self) -> int | None:
        return self.own_rank


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _plain(pg: ManagedProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, group=pg)
    return tensor


def _asynchronous(pg: ManagedProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(tensor, group=pg, async_op=True)
    assert work is not None
    gc.collect()
    future = work.get_future().then(lambda done: done.value()[0].clone())
    result = future.wait()
    assert work.wait() and work.is_completed() and work.is_success()
    assert torch.equal(result, tensor)
    return tensor


def _functional(pg: ManagedProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    result = functional.all_reduce(tensor, "sum", group=pg)
    gc.collect()
    return result + 0


def _compiled(pg: ManagedProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    name = pg.group_name
    return torch.compile(lambda x: functional.all_reduce(x, "sum", group=name) + 0, backend="aot_eager")(
        tensor
    )


WAYS = [_plain, _asynchronous, _functional, _compiled]
Way = Callable[[ManagedProcessGroup, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_it_goes_through_the_manager(default_group: None, way: Way) -> None:
    manager = FakeManager()
    pg = ManagedProcessGroup(manager).register("dp_replicate")
    assert way(pg, torch.ones(2)).tolist() == [10.0, 10.0]
    assert manager.ops == [ReduceOp.SUM]
    assert manager.errors == []
    pg.unregister()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["late", "start", "future"])
def test_every_way_gives_a_handle_and_records_the_error(default_group: None, way: Way, kind: str) -> None:
    error = RuntimeError("peer left")
    failing = {
        "start": FakeManager(start=error),
        "late": FakeManager(error),
        "future": FakeManager(error, future_fails=True),
    }
    manager = failing[kind]
    pg = ManagedProcessGroup(manager).register("dp_replicate")
    assert way(pg, torch.ones(2)).tolist() == [1.0, 1.0]
    assert len(manager.errors) == 1
    pg.unregister()


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(ReduceOp.MAX, torch.float32), (ReduceOp.SUM, torch.int64), (ReduceOp.AVG, torch.float32)],
)
def test_the_reduction_asked_for_is_the_one_done(op: Any, dtype: torch.dtype) -> None:
    manager = FakeManager()
    tensor = torch.ones(2, dtype=dtype)
    dist.all_reduce(tensor, op=op, group=ManagedProcessGroup(manager))
    assert manager.ops == [op]
    assert tensor.tolist() == [10, 10]


def test_a_list_of_tensors_is_one_handle() -> None:
    pg = ManagedProcessGroup(FakeManager())
    tensors = [torch.ones(1), torch.ones(1)]
    work = pg.allreduce(tensors, ReduceOp.SUM)
    assert not work.is_completed()
    assert [float(tensor) for tensor in work.get_future().wait()] == [10.0, 10.0]
    assert work.result() == tensors


def test_size_and_rank_are_the_quorum_s() -> None:
    manager = FakeManager()
    pg = ManagedProcessGroup(manager)
    assert (pg.size(), pg.rank()) == (3, 2)
    manager.participants, manager.own_rank = 0, None
    assert (pg.size(), pg.rank()) == (1, 0)
    assert pg.getBackendName() == "torchft_plus-managed"


def test_it_is_a_dimension_of_a_mesh_and_can_be_taken_back(default_group: None) -> None:
    pg = ManagedProcessGroup(FakeManager())
    assert pg.register("dp_replicate") is pg
    with pytest.raises(RuntimeError, match="unregister"):
        pg.register("again")
    assert pg.group_desc == "dp_replicate"
    mesh = DeviceMesh.from_group(pg, "cpu")
    assert mesh.get_group() is pg
    name = pg.group_name
    pg.unregister()
    pg.unregister()
    with pytest.raises(RuntimeError):
        functional.all_reduce(torch.ones(1), "sum", group=name)
    pg.register("dp_replicate")  # a second time, under another name
    assert _functional(pg, torch.ones(1)).tolist() == [10.0]
    pg.unregister()


def test_without_a_default_group_functional_collectives_work_after_register() -> None:
    assert not dist.is_initialized()
    pg = ManagedProcessGroup(FakeManager()).register("dp_replicate")
    assert _functional(pg, torch.ones(1)).tolist() == [10.0]
    pg.unregister()
