from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from rank_processes import Rank, run_ranks, start_ranks, wait_ended
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import ReduceOp

from torchft_plus.process_group import gloo
from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import LaneError, LaneSpec, LaneTimeout


def _sums(rank: Rank) -> list[float]:
    lane = rank.lane()
    # each once: with duplicates among them a broken one would name nobody
    assert isinstance(lane, gloo.GlooLane) and len(lane._group.sockets) == rank.size - 1
    tensors = [torch.full((1000,), float(rank.rank + i)) for i in range(3)]
    operations = [lane.allreduce(tensor) for tensor in tensors]
    largest = torch.tensor([rank.rank])
    operations.append(lane.allreduce(largest, ReduceOp.MAX))
    wait_ended(operations)
    assert [operation.error for operation in operations] == [None] * 4
    lane.retire()
    return [float(tensor[-1]) for tensor in [*tensors, largest]]


def test_reduces_in_order_over_three_processes() -> None:
    assert run_ranks(_sums, 3) == [[3.0, 6.0, 9.0, 2.0]] * 3


def _kill_in_the_middle(rank: Rank) -> list[float | int]:
    """Everybody but the victim (the last) has an operation pending when it dies."""
    lane = rank.lane()
    operation = lane.allreduce(torch.ones(4))
    wait_ended([operation])
    if rank.rank == rank.size - 1:
        rank.say("ready")
        rank.hear()
        return []
    pending = [lane.allreduce(torch.ones(500_000)) for _ in range(3)]
    rank.say("ready")
    wait_ended(pending)
    noticed = time.time()
    assert all(operation.error is not None for operation in pending)
    assert lane.error is not None
    old = lane
    lane = rank.lane(quorum_id=2, world_size=rank.size - 1)
    again = torch.ones(500_000)
    operation = lane.allreduce(again)
    wait_ended([operation])
    assert operation.error is None
    old.retire()
    lane.retire()
    return [noticed, float(again.sum())]


@pytest.mark.parametrize("size", [2, 4])
def test_all_survivors_notice_a_killed_peer_at_once_and_go_on_in_a_new_lane(size: int) -> None:
    with start_ranks(_kill_in_the_middle, size) as ranks:
        for rank in range(size):
            assert ranks.word(rank) == "ready"
        killed = time.time()
        ranks.signal(size - 1, signal.SIGKILL)
        for rank in range(size - 1):
            noticed, total = ranks.result(rank)
            # the operation's own timeout is 20 s; only ring neighbours see the death itself
            assert noticed - killed < 2
            assert total == 500_000 * (size - 1)


def _fork_a_worker(rank: Rank) -> str:
    """Like a data loader: the victim's child lives on after it, with copies of all its descriptors."""
    lane = rank.lane()
    wait_ended([lane.allreduce(torch.ones(1))])
    if rank.rank == 1:
        worker = os.fork()
        if worker == 0:
            time.sleep(5)
            os._exit(0)
        wait_ended([lane.allreduce(torch.ones(1))])  # the fork did not disturb the lane
        rank.say(worker)
        rank.hear()
    wait_ended([lane.allreduce(torch.ones(1))])
    operation = lane.allreduce(torch.ones(100_000))
    rank.say("ready")
    wait_ended([operation])
    return str(operation.error)


def test_a_death_is_seen_though_a_forked_worker_outlives_it() -> None:
    with start_ranks(_fork_a_worker, 2) as ranks:
        worker = ranks.word(1)
        assert ranks.word(0) == "ready"
        killed = time.monotonic()
        ranks.signal(1, signal.SIGKILL)
        assert ranks.result(0) != "None"
        assert time.monotonic() - killed < 3
        os.kill(worker, 0)  # still there
        os.kill(worker, signal.SIGKILL)


def _frozen_peer(rank: Rank) -> tuple[float, str] | None:
    lane = rank.lane()
    wait_ended([lane.allreduce(torch.ones(1))])
    if rank.rank == 2:
        rank.say("ready")
        rank.hear()
        return None
    operation = lane.allreduce(torch.ones(100_000))
    rank.say("ready")
    if rank.rank == 0:
        rank.hear()
        lane.abort("told that replica 2 is frozen")
    wait_ended([operation])
    ended = time.time()
    assert lane.error is not None
    return ended, str(lane.error)


def test_an_abort_frees_everybody_from_a_frozen_peer() -> None:
    with start_ranks(_frozen_peer, 3) as ranks:
        for rank in range(3):
            assert ranks.word(rank) == "ready"
        ranks.signal(2, signal.SIGSTOP)
        told = time.time()
        ranks.tell("abort", 0)
        results = [ranks.result(0), ranks.result(1)]
        assert all(ended - told < 2 for ended, _ in results)
        assert results[0][1] == "told that replica 2 is frozen"


_EXIT_SCRIPT = """
import threading, torch
from torch._C._distributed_c10d import HashStore
from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import LaneSpec
lanes = {}
def build(store, pair, rank):
    lanes[pair, rank] = GlooBackend().create(LaneSpec(store, rank, 2, pair, timeout_ms=40_000))
threads = []
for pair in range(2):
    store = HashStore()
    threads += [threading.Thread(target=build, args=(store, pair, rank)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
lanes[0, 0].allreduce(torch.ones(3)).add_done_callback(lambda: None)  # nobody answers
lanes[1, 0].retire()  # under way while the interpreter ends
"""


def test_a_process_with_a_pending_operation_ends_at_once_and_in_good_order() -> None:
    script = subprocess.Popen([sys.executable, "-c", _EXIT_SCRIPT], stderr=subprocess.PIPE, text=True)
    _, errors = script.communicate(timeout=35)  # below the operation's timeout
    assert (script.returncode, errors) == (0, "")


def _rebuild(rank: Rank, rounds: int) -> list[tuple[int, int]]:
    counts = []
    for quorum_id in range(1, rounds + 1):
        lane = rank.lane(quorum_id=quorum_id, timeout_ms=10_000)
        operation = lane.allreduce(torch.ones(1000))
        wait_ended([operation])
        assert operation.error is None
        if quorum_id % 10 == 0:
            lane.allreduce(torch.ones(1000)) if rank.rank == 0 else None
        lane.retire()
        del lane
        if quorum_id in (10, rounds):
            most = tuple(count + 1 for count in counts[0]) if counts else None
            deadline = time.monotonic() + 10
            while (
                gloo._live_groups or (most and any(map(operator.gt, _held(), most)))
            ) and time.monotonic() < deadline:
                time.sleep(0.01)  # the last threads of a busy machine take their time to end
            assert not gloo._live_groups
            counts.append(_held())
    return counts


def _held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_hundred_rebuilds_leave_no_threads_and_no_descriptors() -> None:
    for early, late in run_ranks(_rebuild, 2, 100):
        assert late[0] <= early[0] + 1
        assert late[1] <= early[1] + 1


def _threads_as_ranks(size: int, timeout_ms: int = 5_000) -> list[gloo.GlooLane]:
    store = HashStore()
    lanes: list[gloo.GlooLane | None] = [None] * size

    def build(rank: int) -> None:
        lanes[rank] = GlooBackend().create(LaneSpec(store, rank, size, 7, timeout_ms))  # type: ignore[assignment]

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(lanes)
    return lanes  # type: ignore[return-value]


def test_abort_takes_only_its_own_lane_even_in_one_process() -> None:
    first, second = _threads_as_ranks(2), _threads_as_ranks(2)
    first[0].abort("for the test")
    operation = first[1].allreduce(torch.ones(3))
    wait_ended([operation], 3)
    assert operation.error is not None
    tensors = [torch.ones(3), torch.ones(3)]
    operations = [lane.allreduce(tensor) for lane, tensor in zip(second, tensors, strict=True)]
    wait_ended(operations, 5)
    assert [float(tensor[0]) for tensor in tensors] == [2.0, 2.0]
    for lane in [*first, *second]:
        lane.retire()
        lane.retire()
        lane.abort("again")


def test_a_lane_without_found_connections_still_ends_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "parse_listener", lambda record: None)
    lanes = _threads_as_ranks(2, timeout_ms=2_000)
    operation = lanes[0].allreduce(torch.ones(3))
    assert not operation.poll()
    lanes[0].abort("for the test")
    assert operation.poll()
    assert str(operation.error) == "for the test"
    for lane in lanes:
        lane.retire()


def test_the_deadline_of_an_operation_is_the_lane_s() -> None:
    lanes = _threads_as_ranks(2, timeout_ms=1_000)
    operation = lanes[0].allreduce(torch.ones(3))
    heard: list[str] = []
    operation.add_done_callback(lambda: heard.append(threading.current_thread().name))
    wait_ended([operation], 10)
    assert "1000ms" in str(operation.error)
    operation.add_done_callback(lambda: heard.append("at once"))
    assert len(heard) == 2
    assert heard[0] != "MainThread"
    assert heard[1] == "at once"
    for lane in lanes:
        lane.retire()


def test_a_dropped_lane_is_destroyed_though_nobody_retired_it() -> None:
    lanes = _threads_as_ranks(2)
    before = len(gloo._live_groups)
    assert before >= 2
    operation = lanes[0].allreduce(torch.ones(3))
    lanes.clear()
    wait_ended([operation], 5)
    assert operation.error is not None
    deadline = time.monotonic() + 10
    while len(gloo._live_groups) > before - 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(gloo._live_groups) <= before - 2


def test_averages_are_refused_with_the_mend() -> None:
    lane = GlooBackend().create(LaneSpec(HashStore(), 0, 1, 1, 1_000))
    with pytest.raises(ValueError, match="divide by the number of contributors"):
        lane.allreduce(torch.ones(1), ReduceOp.AVG)


def test_a_peer_that_does_not_come_is_named_within_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(LaneTimeout, match="timed out after 1 seconds; not there: replica rank 1") as caught:
        GlooBackend().create(LaneSpec(HashStore(), 0, 2, 3, timeout_ms=60_000, build_timeout_ms=1_000))
    assert caught.value.peer_rank == 1
    assert isinstance(caught.value, TimeoutError), "as torchft's groups in child processes raise"
    assert time.monotonic() - started < 10


class _SilentStore(Store):
    """A store whose host is frozen: calls hang, on whatever thread."""

    def set(self, key: str, value: str) -> None:
        threading.Event().wait(20)

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait(20)
        return False


def test_a_store_that_hangs_does_not_hang_the_build() -> None:
    started = time.monotonic()
    with pytest.raises(LaneError, match="did not return within"):
        GlooBackend().create(LaneSpec(_SilentStore(), 0, 2, 3, timeout_ms=1_000))
    assert time.monotonic() - started < 10


def test_alone_every_operation_is_done_at_once() -> None:
    lane = GlooBackend().create(LaneSpec(HashStore(), 0, 1, 1, 1_000))
    tensor = torch.tensor([1.0, float("nan")])
    operation = lane.allreduce(tensor)
    assert operation.poll() and operation.error is None
    assert tensor[0] == 1.0
    gathered = [torch.zeros(2)]
    lane.process_group().allgather([gathered], [torch.ones(2)]).wait()
    assert gathered[0].tolist() == [1.0, 1.0]
    lane.abort("enough")
    assert lane.allreduce(tensor).error is lane.error
    lane.retire()


def test_a_tensor_that_gloo_cannot_reduce_is_the_caller_s_mistake_and_breaks_nothing() -> None:
    lanes = _threads_as_ranks(2)
    for tensor, sentence in [
        (torch.ones(1, dtype=torch.int16), r"torch.int16, which gloo does not reduce: cast it"),
        (torch.ones(1, device="meta"), r"on meta, and gloo reduces cpu tensors: move it"),
        (torch.ones(4, 4)[:, :2], r"shape \(4, 2\) is not contiguous"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            lanes[0].allreduce(tensor)
    tensors = [torch.ones(1), torch.ones(1)]
    wait_ended([lane.allreduce(tensor) for lane, tensor in zip(lanes, tensors, strict=True)], 5)
    assert float(tensors[1]) == 2.0
    for lane in lanes:
        lane.retire()
