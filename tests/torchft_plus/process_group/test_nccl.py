from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from rank_processes import wait_ended
from torch._C._distributed_c10d import HashStore
from torch.distributed import ReduceOp

from torchft_plus.process_group import nccl
from torchft_plus.process_group.backends import backend
from torchft_plus.process_group.lane import LaneError, LaneSpec
from torchft_plus.process_group.nccl import NcclBackend


class Work:
    """Ends on another thread, after a while, well or not; or never."""

    def __init__(self, seconds: float | None, failure: str = "") -> None:
        self._ended = threading.Event()
        self._failure = failure
        if seconds is not None:
            timer = threading.Timer(seconds, self._ended.set)
            timer.daemon = True
            timer.start()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return not self._failure

    def exception(self) -> str:
        return self._failure


class Group:
    """A raw group that does what the test says."""

    def __init__(self, *works: Work | str, abort: float | None = 0.0) -> None:
        self._works = list(works)
        self._abort_seconds = abort
        self.aborted = threading.Event()
        self.abort_thread = ""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        work = self._works.pop(0)
        if isinstance(work, str):
            raise RuntimeError(work)
        return work

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        out_splits: list[int],
        in_splits: list[int],
        options: Any,
    ) -> Work:
        return self.allreduce([output, input], options)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> Work:
        return self.allreduce([output, input], options)

    def abort(self) -> None:
        self.abort_thread = threading.current_thread().name
        self.aborted.wait(self._abort_seconds)
        if self._abort_seconds is not None:
            self.aborted.set()


def _lane(group: Any, timeout_ms: int = 20_000, abort_timeout_ms: int = 5_000) -> nccl.NcclLane:
    maker = NcclBackend(abort_timeout_ms=abort_timeout_ms, make_group=lambda spec: group, device_type="cpu")
    lane = maker.create(LaneSpec(HashStore(), 0, 2, 5, timeout_ms))
    assert isinstance(lane, nccl.NcclLane)
    return lane


def test_outcomes_are_heard_late_and_on_another_thread() -> None:
    lane = _lane(Group(Work(0.05), Work(0.1)))
    first, second = lane.allreduce(torch.ones(1)), lane.allreduce(torch.ones(1), ReduceOp.MAX)
    heard: list[str] = []
    second.add_done_callback(lambda: heard.append(threading.current_thread().name))
    assert not first.poll()
    wait_ended([first, second], 5)
    assert first.error is None and second.error is None and lane.error is None
    assert heard == ["poll nccl lane 5"]
    lane.retire()


def test_a_failed_operation_aborts_the_lane_and_ends_the_others() -> None:
    group = Group(Work(None), Work(0.02, "remote process exited"))
    lane = _lane(group)
    operations = [lane.allreduce(torch.ones(1)), lane.allreduce(torch.ones(1))]
    wait_ended(operations, 5)
    assert all("remote process exited" in str(operation.error) for operation in operations)
    assert group.aborted.is_set()
    assert lane.allreduce(torch.ones(1)).error is lane.error


def test_operations_end_only_when_the_abort_is_done() -> None:
    group = Group(Work(None), abort=0.2)
    lane = _lane(group)
    operation = lane.allreduce(torch.ones(1))
    still_aborting: list[bool] = []
    operation.add_done_callback(lambda: still_aborting.append(not group.aborted.is_set()))
    started = time.monotonic()
    lane.abort("told")
    lane.abort("again")
    assert time.monotonic() - started < 0.15
    assert not operation.poll()
    wait_ended([operation], 5)
    assert still_aborting == [False]
    assert str(operation.error) == "told"
    assert "abort nccl lane" in group.abort_thread


def test_an_abort_that_hangs_ends_the_operations_and_keeps_their_memory() -> None:
    group = Group(Work(None), abort=None)
    lane = _lane(group, abort_timeout_ms=200)
    tensor = torch.ones(1)
    operation = lane.allreduce(tensor)
    lane.abort("told")
    wait_ended([operation], 5)
    assert str(operation.error) == "told"
    assert any(lost is group and running[0].tensors[0] is tensor for lost, running in nccl._lost)
    group.aborted.set()


def test_exchanges_end_late_fail_and_are_aborted_as_reductions_are() -> None:
    group = Group(Work(0.02), Work(0.04), Work(None), Work(None), abort=0.05)
    lane = _lane(group)
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(2)]
    operations = [lane.all_to_all(tensors[0], tensors[1]), lane.all_gather(tensors[0], tensors[2])]
    assert not operations[0].poll()
    wait_ended(operations, 5)
    assert [operation.error for operation in operations] == [None, None]
    place = lane.reserve(last=True)
    behind = lane.allreduce(torch.ones(1))
    assert (
        not behind.poll() and len(group._works) == 2
    )  # not in the library before what has its place before it
    second = lane.all_gather(tensors[0], tensors[2], place)
    assert not group._works
    lane.abort("told")
    wait_ended([second, behind], 5)
    assert str(second.error) == str(behind.error) == "told"
    assert str(lane.all_to_all(tensors[0], tensors[1]).error) == "told"


def test_who_waits_for_a_place_does_not_wait_for_an_abort_that_hangs() -> None:
    group = Group(Work(None), abort=None)
    lane = _lane(group, abort_timeout_ms=20_000)
    lane.all_to_all(torch.zeros(4), torch.zeros(4))
    lane.reserve(last=True)
    behind = lane.allreduce(torch.ones(1))
    started = time.monotonic()
    lane.abort("told")
    assert time.monotonic() - started < 1
    assert str(behind.error) == "told"
    group.aborted.set()
    assert lane.wait_over(5)


def test_the_deadline_of_an_operation_is_the_lane_s_on_nccl_too() -> None:
    lane = _lane(Group(Work(None)), timeout_ms=100)
    operation = lane.allreduce(torch.ones(1))
    wait_ended([operation], 5)
    assert "within 100 ms" in str(operation.error)


def test_an_operation_that_cannot_start_fails_and_breaks_the_lane() -> None:
    lane = _lane(Group("communicator was aborted"))
    operation = lane.allreduce(torch.ones(1))
    assert operation.poll()
    assert "communicator was aborted" in str(lane.error)
    with pytest.raises(LaneError):
        lane.process_group()


def test_a_set_up_that_hangs_is_left_behind_and_cleaned_up_when_it_returns() -> None:
    go, late = threading.Event(), Group()

    def make(spec: LaneSpec) -> Group:
        go.wait(20)
        return late

    with pytest.raises(LaneError, match="did not return within 100 ms"):
        NcclBackend(make_group=make).create(LaneSpec(HashStore(), 0, 2, 5, 20_000, build_timeout_ms=100))
    go.set()
    assert late.aborted.wait(5)


def test_a_set_up_that_fails_is_an_ordinary_fault() -> None:
    def make(spec: LaneSpec) -> Group:
        raise RuntimeError("connection refused")

    with pytest.raises(LaneError, match=r"quorum 5 could not be built .connection refused"):
        NcclBackend(make_group=make).create(LaneSpec(HashStore(), 0, 2, 5, 1_000))


def test_alone_no_communicator_is_needed() -> None:
    lane = NcclBackend(make_group=lambda spec: pytest.fail("made")).create(
        LaneSpec(HashStore(), 0, 1, 5, 1_000)
    )
    assert lane.allreduce(torch.ones(1)).poll()


def test_a_retired_lane_leaves_no_thread() -> None:
    lane = _lane(Group())
    lane.retire()
    assert lane.wait_over(5)
    deadline = time.monotonic() + 5
    while (
        any("nccl lane 5" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not any("nccl lane 5" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("glo", "'gloo'"), ("ncll", "'nccl'"), ("RCCL", "'rccl'"), ("zzz", "known are gloo, nccl, rccl")],
)
def test_an_unknown_backend_offers_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{hint}"):
        backend(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["nccl", "rccl"])
def test_without_a_gpu_the_backend_says_so_and_what_to_use(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}.*use .*gloo"):
        backend(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
def test_a_lane_of_one_process_on_a_gpu() -> None:
    lane = NcclBackend().create(LaneSpec(HashStore(), 0, 1, 5, 20_000))
    group = lane.process_group()
    tensor = torch.ones(4, device="cuda")
    group.allreduce([tensor]).wait()
    assert tensor.sum().item() == 4.0
    group.abort()
