from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from held_lane import HeldLane
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import Rank, run_ranks, wait_ended
from torch import nn
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import LaneError
from torchft_plus.reduce.recorded import RecordedOperations
from torchft_plus.reduce.reducer import GradientReducer

SUM, AVG, MAX, MIN, PRODUCT = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT
BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR


def _values(rank: int) -> list[float]:
    return [rank + 1.0, -2.0 * rank - 1, 0.5, 3.0 - rank]


def _expected(op: Any, contributors: list[int]) -> torch.Tensor:
    rows = torch.tensor([_values(rank) for rank in contributors], dtype=torch.float64)
    if op == AVG:
        return rows.mean(0)
    return {SUM: rows.sum(0), MAX: rows.amax(0), MIN: rows.amin(0), PRODUCT: rows.prod(0)}[op]


def _table(rank: Rank, joiner: int | None) -> list[str]:
    """Every reduction x dtype x layout, with and without a joiner; returns what was wrong."""
    lane = rank.lane()
    contributors = [one for one in range(rank.size) if one != joiner]
    wrong: list[str] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for op in (SUM, AVG, MAX, MIN, PRODUCT):
            recorded = RecordedOperations()
            recorded.begin(lane, 0.0 if rank.rank == joiner else 1.0)
            plain = torch.tensor(_values(rank.rank), dtype=dtype)
            strided = torch.tensor([_values(rank.rank), [9.0] * 4], dtype=dtype).t()[:, :1]
            scalar = torch.tensor(_values(rank.rank)[0], dtype=dtype)
            works = [recorded.start(tensor, op) for tensor in (plain, strided, scalar)]
            assert all(work.wait() for work in works)
            posted = recorded.post(lane)
            wait_ended(posted.operations)
            recorded.write_back(float(len(contributors)))
            want = _expected(op, contributors)
            for got in (plain, strided.flatten(), scalar.view(1)):
                if not torch.allclose(got.double(), want[: got.numel()], rtol=0.01):
                    wrong.append(f"{op} {dtype} {got} {want}")
            if recorded.results_changed:
                wrong.append(f"{op} {dtype} changed")
    whole = torch.tensor([0b1100 + rank.rank, 7], dtype=torch.int64)
    recorded = RecordedOperations()
    recorded.begin(lane, 0.0 if rank.rank == joiner else 1.0)
    tensors = {op: whole.clone() for op in (SUM, MAX, MIN, BAND, BOR, BXOR)}
    for op, tensor in tensors.items():
        recorded.start(tensor, op).wait()
    first = [0b1100 + one for one in contributors]
    wants = {SUM: sum(first), MAX: max(first), MIN: min(first)}
    for op, want in wants.items():
        if int(tensors[op][0]) != want:
            wrong.append(f"{op} int64 {tensors[op]} {want}")
    for op, fold in ((BAND, int.__and__), (BOR, int.__or__), (BXOR, int.__xor__)):
        want = first[0]
        for one in first[1:]:
            want = fold(want, one)
        if int(tensors[op][0]) != want:
            wrong.append(f"{op} int64 {tensors[op]} {want}")
    return wrong


@pytest.mark.parametrize(("size", "joiner"), [(1, None), (2, None), (2, 1), (3, None), (3, 0)])
def test_what_was_asked_is_what_is_reduced_over_the_contributors(size: int, joiner: int | None) -> None:
    assert run_ranks(_table, size, joiner) == [[]] * size


def _plus(amount: float) -> Any:
    """The other member: adds ``amount`` and, in an average, itself."""

    def add(tensor: torch.Tensor, op: Any) -> None:
        tensor[:-1].add_(amount)
        tensor[-1:].add_(1)

    return add


def _started(
    lane: HeldLane | None, *values: float
) -> tuple[RecordedOperations, list[torch.Tensor], list[Any]]:
    recorded = RecordedOperations()
    recorded.begin(lane, 1.0)
    tensors = [torch.full((3,), value) for value in values]
    return recorded, tensors, [recorded.start(tensor, AVG) for tensor in tensors]


def test_wait_blocks_until_the_result_is_there() -> None:
    lane = HeldLane(others=_plus(5.0))
    _, (tensor,), (work,) = _started(lane, 1.0)
    assert not work.wait(timedelta(milliseconds=10))
    assert not work.is_done() and tensor.tolist() == [1.0] * 3
    threading.Timer(0.05, lane.end).start()
    assert work.wait()
    assert tensor.tolist() == [3.0] * 3
    assert work.is_success() and work.exception() is None and work.result() == [tensor]


def test_a_broken_lane_raises_nothing_and_leaves_the_input() -> None:
    lane = HeldLane()
    recorded, (tensor,), (work,) = _started(lane, 1.0)
    future = work.get_future()
    chained = future.then(lambda done: done.value()[0] + 1)
    lane.end(LaneError("peer left"))
    assert work.wait() is False
    assert tensor.tolist() == [1.0] * 3
    assert chained.wait().tolist() == [2.0] * 3
    assert isinstance(work.exception(), LaneError)
    assert recorded.start(torch.ones(1), SUM).get_future().wait()[0].tolist() == [1.0]
    assert [str(operation.error) for operation in recorded.post(lane).operations] == ["peer left"] * 2


def test_a_future_ends_late_on_another_thread_with_the_result_written() -> None:
    lane = HeldLane(others=_plus(5.0))
    _, (tensor,), (work,) = _started(lane, 1.0)
    seen: list[float] = []
    chained = work.get_future().then(lambda done: seen.append(float(done.value()[0][0])))
    threading.Timer(0.05, lane.end).start()
    chained.wait()
    assert tensor.tolist() == [3.0] * 3
    assert work.get_future() is work.get_future()
    assert seen == [3.0]


def test_a_retry_starts_from_the_saved_inputs_and_replaces_results() -> None:
    broken, fresh = HeldLane(others=_plus(5.0)), HeldLane(others=_plus(7.0))
    recorded, (first, second), works = _started(broken, 1.0, 2.0)
    broken.end(last=1)
    assert works[0].wait() and first.tolist() == [3.0] * 3
    broken.end(LaneError("peer left"), first=1)
    assert works[1].wait() is False
    posted = recorded.post(fresh)
    assert [tensor[:-1].tolist() for tensor, _ in fresh.started] == [[1.0] * 3, [2.0] * 3]
    assert not {id(t) for t, _ in fresh.started} & {id(t) for t, _ in broken.started}
    fresh.end()
    assert all(operation.poll() and operation.error is None for operation in posted.operations)
    recorded.write_back(2.0)
    assert (first.tolist(), second.tolist()) == ([4.0] * 3, [4.5] * 3)
    assert recorded.results_changed


@pytest.mark.parametrize("clip", [1.0, 0.5])
@pytest.mark.parametrize("failed", [False, True])
def test_the_caller_is_told_if_a_retry_replaces_what_it_waited_for(failed: bool, clip: float) -> None:
    broken, fresh = HeldLane(others=_plus(5.0)), HeldLane(others=_plus(7.0))
    recorded, (tensor,), (work,) = _started(broken, 1.0)
    broken.end(LaneError("peer left") if failed else None)
    assert work.wait() is not failed
    tensor.mul_(clip)  # clipping, which may change nothing
    recorded.post(fresh)
    fresh.end()
    recorded.write_back(2.0)
    assert tensor.tolist() == [4.0] * 3
    assert recorded.results_changed


def test_changes_made_to_a_final_result_are_kept() -> None:
    lane = HeldLane(others=_plus(5.0))
    recorded, (tensor,), (work,) = _started(lane, 1.0)
    lane.end()
    work.wait()
    tensor.mul_(0.5)
    recorded.post(lane)
    recorded.write_back(2.0)
    assert tensor.tolist() == [1.5] * 3
    assert not recorded.results_changed


def test_views_of_one_tensor_are_replaced_together() -> None:
    broken, fresh = HeldLane(others=_plus(5.0)), HeldLane(others=_plus(7.0))
    recorded = RecordedOperations()
    recorded.begin(broken, 1.0)
    whole = torch.ones(6)
    works = [recorded.start(part, AVG) for part in whole.split(3)]
    broken.end()
    assert all(work.wait() for work in works)
    recorded.post(fresh)
    fresh.end()
    recorded.write_back(2.0)
    assert recorded.results_changed
    assert whole.tolist() == [4.0] * 6


def test_started_before_there_is_a_lane_it_is_posted_at_the_end() -> None:
    recorded, (tensor,), (work,) = _started(None, 1.0)
    assert work.wait() is False
    lane = HeldLane(others=_plus(5.0))
    assert len(recorded.post(lane).operations) == 1
    assert len(recorded.post(lane).operations) == len(lane.started) == 1
    recorded.again()
    recorded.post(lane)
    assert len(lane.started) == 2
    lane.end()
    recorded.write_back(2.0)
    assert tensor.tolist() == [3.0] * 3


def test_a_contribution_can_be_taken_back_within_the_step() -> None:
    lane = HeldLane(others=_plus(5.0))
    recorded, (tensor,), _ = _started(lane, 1.0)
    recorded.begin(None, 0.0)
    recorded.post(lane)
    assert lane.started[1][0].tolist() == [0.0] * 4
    lane.end()
    recorded.write_back(1.0)
    assert tensor.tolist() == [5.0] * 3


def test_a_refused_step_is_forgotten() -> None:
    lane = HeldLane()
    recorded, _, _ = _started(lane, 1.0)
    recorded.discard()
    recorded.begin(lane, 1.0)
    assert recorded.post(lane).operations == ()


@given(st.integers(2, 300), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_contributors_are_counted_exactly_in_every_dtype(world_size: int, dtype: torch.dtype) -> None:
    def others(tensor: torch.Tensor, op: Any) -> None:
        for _ in range(world_size - 1):  # one by one, as a ring does
            tensor.add_(torch.ones_like(tensor))

    lane = HeldLane(world_size, others)
    recorded = RecordedOperations()
    recorded.begin(lane, 1.0)
    tensor = torch.ones(2, dtype=dtype)
    work = recorded.start(tensor, AVG)
    lane.end()
    work.wait()
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("tensor", "op", "sentence"),
    [
        (torch.ones(1), ReduceOp.PREMUL_SUM, "cannot be repeated among survivors: use one of SUM, AVG"),
        (torch.ones(1, dtype=torch.int64), AVG, "use a sum, or a floating tensor"),
        (torch.ones(1), BAND, "it needs integers"),
        (torch.ones(1, dtype=torch.bool), SUM, "is torch.bool, which not every backend reduces"),
        (torch.ones(2, 2).to_sparse(), SUM, "reduce a dense one"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_mend(tensor: torch.Tensor, op: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RecordedOperations().start(tensor, op)


def _mixed_with_gradients(rank: Rank) -> list[list[float]]:
    """Rank 1 has restarted in step 2: its hooks have learned nothing, it posts gradients late."""
    lane = rank.lane()
    results: list[list[float]] = []
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]

    def reducers() -> list[GradientReducer]:
        made = [
            GradientReducer(list(model.named_parameters()), bucket_bytes=1, first_bucket_bytes=1)
            for model in models
        ]
        made[1].follow(made[0])
        return made

    chain = reducers()
    for step in range(4):
        if step == 2 and rank.rank == 1:
            chain = reducers()
        recorded = RecordedOperations()
        recorded.follow(chain[1])
        for reduction in (recorded, *chain):
            reduction.begin(lane, 1.0)
        early, late = torch.full((72,), rank.rank + 1.0), torch.full((72,), rank.rank + 10.0)
        recorded.start(early, SUM)
        for model in models:
            model.zero_grad()
        for model in models if rank.rank == 0 else reversed(models):
            model(torch.full((1, 8), rank.rank + 1.0)).sum().backward()
        assert recorded.start(late, SUM).wait()
        operations = [op for reduction in (recorded, *chain) for op in reduction.post(lane).operations]
        wait_ended(operations)
        assert all(operation.error is None for operation in operations)
        for reduction in (recorded, *chain):
            reduction.write_back(2.0)
        assert not recorded.results_changed
        results.append([float(early.sum()) / 72, float(late.sum()) / 72])
        results[-1] += [float(p.grad.sum()) for model in models for p in model.parameters()]  # type: ignore[union-attr]
    return results


def test_recorded_operations_and_gradients_share_a_lane_without_mixing() -> None:
    first, second = run_ranks(_mixed_with_gradients, 2)
    assert first == second
    assert all(row[:2] == [3.0, 21.0] for row in first)
    assert all(row[2:] == pytest.approx(first[0][2:]) for row in first)
