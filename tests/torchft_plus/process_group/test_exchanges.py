"""all_to_all and all_gather of real gloo lanes: as patient, and as easily ended, as allreduce."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from rank_processes import Rank, run_ranks, start_ranks, wait_ended
from torch._C._distributed_c10d import HashStore

from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import Lane, LaneSpec, Operation


def _start(lane: Lane, stage: str, part: int) -> tuple[torch.Tensor, Operation]:
    size = lane.spec.world_size
    output = torch.zeros(size * part, dtype=torch.uint8)
    if stage == "all_to_all":
        return output, lane.all_to_all(output, torch.full((size * part,), lane.spec.rank, dtype=torch.uint8))
    return output, lane.all_gather(output, torch.full((part,), lane.spec.rank, dtype=torch.uint8))


def _content(rank: Rank) -> None:
    lane = rank.lane()
    for part in (0, 1, 5, 4096):
        numbers = torch.arange(rank.size * part) + 1_000_000 * rank.rank
        exchanged = torch.empty_like(numbers)
        gathered = torch.empty(rank.size * part)
        operations = [
            lane.all_to_all(exchanged, numbers),
            lane.allreduce(torch.ones(3)),
            lane.all_gather(gathered, torch.full((part,), float(rank.rank))),
        ]
        wait_ended(operations)
        assert [operation.error for operation in operations] == [None] * 3
        mine = slice(rank.rank * part, (rank.rank + 1) * part)
        expected = [torch.arange(rank.size * part)[mine] + 1_000_000 * peer for peer in range(rank.size)]
        assert torch.equal(exchanged, torch.cat(expected))
        assert torch.equal(gathered, torch.arange(rank.size).repeat_interleave(part).float())
    lane.retire()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_arrive_where_they_belong(size: int) -> None:
    run_ranks(_content, size)


def _kill(rank: Rank, stage: str) -> list[float]:
    """The last rank dies while the others have the exchange pending; they go on in a new lane."""
    lane = rank.lane()
    wait_ended([lane.allreduce(torch.ones(1))])
    if rank.rank == rank.size - 1:
        rank.say("ready")
        rank.hear()
        return []
    pending = [_start(lane, stage, 300_000)[1] for _ in range(3)]
    rank.say("ready")
    wait_ended(pending)
    noticed = time.time()
    assert all(operation.error is not None for operation in pending) and lane.error is not None
    fresh = rank.lane(quorum_id=2, world_size=rank.size - 1)
    output, operation = _start(fresh, stage, 300_000)
    wait_ended([operation])
    assert operation.error is None
    return [noticed, float(output[-1])]


@pytest.mark.parametrize("stage", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_killed_peer_ends_an_exchange_for_everybody(stage: str, size: int) -> None:
    with start_ranks(_kill, size, stage) as ranks:
        for rank in range(size):
            assert ranks.word(rank) == "ready"
        killed = time.time()
        ranks.signal(size - 1, signal.SIGKILL)
        for rank in range(size - 1):
            noticed, last = ranks.result(rank)
            assert noticed - killed < 3
            assert last == size - 2


def _frozen(rank: Rank, stage: str) -> tuple[float, str] | None:
    lane = rank.lane()
    wait_ended([lane.allreduce(torch.ones(1))])
    if rank.rank == 2:
        rank.say("ready")
        rank.hear()
        return None
    _, operation = _start(lane, stage, 100_000)
    rank.say("ready")
    if rank.rank == 0:
        rank.hear()
        lane.abort("told that replica 2 is frozen")
    wait_ended([operation])
    return time.time(), str(operation.error)


@pytest.mark.parametrize("stage", ["all_to_all", "all_gather"])
def test_an_abort_frees_everybody_from_a_frozen_peer_in_an_exchange(stage: str) -> None:
    with start_ranks(_frozen, 3, stage) as ranks:
        for rank in range(3):
            assert ranks.word(rank) == "ready"
        ranks.signal(2, signal.SIGSTOP)
        told = time.time()
        ranks.tell("abort", 0)
        results = [ranks.result(0), ranks.result(1)]
        assert all(ended - told < 3 and error != "None" for ended, error in results)
        assert results[0][1] == "told that replica 2 is frozen"


def _pair(timeout_ms: int) -> list[Lane]:
    store = HashStore()
    lanes: dict[int, Lane] = {}

    def build(rank: int) -> None:
        lanes[rank] = GlooBackend().create(LaneSpec(store, rank, 2, 7, timeout_ms))

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [lanes[0], lanes[1]]


@pytest.mark.parametrize("stage", ["all_to_all", "all_gather"])
def test_the_deadline_of_an_exchange_is_the_lane_s(stage: str) -> None:
    lanes = _pair(1_000)
    _, operation = _start(lanes[0], stage, 8)
    wait_ended([operation], 10)
    assert "1000ms" in str(operation.error)
    for lane in lanes:
        lane.retire()


def test_what_waits_for_its_place_ends_with_the_lane() -> None:
    lanes = _pair(20_000)
    output, operation = _start(lanes[0], "all_to_all", 8)
    place = lanes[0].reserve(last=True)
    behind = lanes[0].allreduce(torch.ones(1))
    assert not behind.poll() and not operation.poll()
    lanes[0].abort("for the test")
    wait_ended([operation, behind], 5)
    assert str(behind.error) == "for the test"
    late = lanes[0].all_gather(torch.empty(32, dtype=torch.uint8), output, place)
    assert str(late.error) == "for the test"
    for lane in lanes:
        lane.retire()


def test_alone_an_exchange_is_a_copy() -> None:
    lane = GlooBackend().create(LaneSpec(HashStore(), 0, 1, 1, 1_000))
    output = torch.zeros(3)
    assert lane.all_to_all(output, torch.ones(3)).poll()
    assert lane.all_gather(output, torch.full((3,), 2.0), lane.reserve(last=True)).error is None
    assert output.tolist() == [2.0] * 3
    lane.abort("enough")
    assert lane.all_gather(output, torch.ones(3)).error is lane.error


def test_what_is_not_equal_parts_is_the_caller_s_mistake() -> None:
    lanes = _pair(5_000)
    flat = torch.zeros(4)
    for output, input, sentence in [
        (flat, torch.zeros(2, 2), r"shape \(2, 2\).*pass flat"),
        (flat, torch.zeros(8)[::2], "pass flat, contiguous"),
        (flat, torch.zeros(4, device="meta"), "on meta"),
        (flat, torch.zeros(4, dtype=torch.float64), "do not fit"),
        (torch.zeros(3), torch.zeros(3), "3 elements are not 2 equal parts: pad them"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            lanes[0].all_to_all(output, input)
    with pytest.raises(ValueError, match="one must hold 2 times"):
        lanes[0].all_gather(flat, flat)
    results = [_start(lane, "all_gather", 2) for lane in lanes]
    wait_ended([operation for _, operation in results], 5)
    assert results[0][0].tolist() == [0, 0, 1, 1]
    for lane in lanes:
        lane.retire()
