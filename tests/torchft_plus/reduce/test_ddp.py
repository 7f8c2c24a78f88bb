from __future__ import annotations

from typing import Any

import pytest
import torch
from held_lane import HeldLane
from rank_processes import Rank, run_ranks, wait_ended
from reduction_cases import data
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchft_plus.process_group.lane import Lane
from torchft_plus.reduce.ddp import DistributedDataParallel
from torchft_plus.reduce.reduction import Reduction


class PlainManager:
    """Only keeps what is attached."""

    def __init__(self) -> None:
        self.reductions: list[Reduction] = []

    def attach(self, reduction: Reduction) -> None:
        self.reductions.append(reduction)

    def backward_ended(self) -> None:
        """The test finishes the step itself."""


class EndingManager(PlainManager):
    """Averages when backward ends."""

    def __init__(self, lane: Lane, total: float) -> None:
        super().__init__()
        self.lane = lane
        self.total = total
        self.ends = 0

    def backward_ended(self) -> None:
        self.ends += 1
        for reduction in self.reductions:
            posted = reduction.post(self.lane)
            wait_ended(posted.operations)
            assert not posted.stale
            reduction.write_back(self.total)


class Block(nn.Module):
    """Two outputs, one of them nested, and a part inside a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outer = nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)
        return {"loss": self.outer(self.norm(hidden)).square().mean(), "more": [hidden.sum(), 3, None]}


def _against_torch(rank: Rank, buffers: str) -> tuple[list[float], list[float]]:
    """The same training as torch's own wrapper: clipping sees averages; accumulation in no_sync."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=rank.store("torch"), rank=rank.rank, world_size=rank.size)
    lane = rank.lane()
    losses: list[list[float]] = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = Block()
        manager = EndingManager(lane, float(rank.size))
        if ours:
            wrapped: Any = DistributedDataParallel(manager, model, bucket_cap_mb=0.001, buffers=buffers)  # type: ignore[arg-type]
        else:
            wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        values: list[float] = []
        for step in range(4):
            optimizer.zero_grad()
            if ours:
                for reduction in manager.reductions:
                    reduction.begin(lane, 1.0)
            with wrapped.no_sync():
                wrapped(data(rank.rank, step, 0))["loss"].backward()
            loss = wrapped(data(rank.rank, step, 1))["loss"]
            loss.backward()
            values.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
        values += [float(parameter.sum()) for parameter in model.parameters()]
        values.append(float(model.norm.running_mean.sum()))  # type: ignore[union-attr]
        if ours:
            assert manager.ends == 4
        losses.append(values)
    dist.destroy_process_group()
    return losses[0], losses[1]


def test_trains_as_torch_s_wrapper_does() -> None:
    for ours, theirs in run_ranks(_against_torch, 2, "local"):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_buffers_are_equal_on_all_replicas_if_they_are_reduced() -> None:
    (first, _), (second, _) = run_ranks(_against_torch, 2, "reduce")
    assert first == pytest.approx(second, rel=1e-6)
    assert first[-1] == second[-1]


def _wrapped(**changes: Any) -> tuple[DistributedDataParallel, HeldLane]:
    manager = PlainManager()
    model = DistributedDataParallel(manager, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **changes)
    assert manager.reductions == [model.reducer]
    lane = HeldLane()
    model.reducer.begin(lane, 1.0)
    return model, lane


def test_everything_is_posted_when_backward_ends_and_the_rest_of_the_step_needs_nothing_of_it() -> None:
    model, lane = _wrapped()
    for _ in range(2):
        lane.forget()
        model.reducer.begin(lane, 1.0)
        model(torch.ones(2, 4)).sum().backward()
        assert len(lane.started) == 1
        lane.end()
        assert len(model.reducer.post(lane).operations) == 1
    with torch.no_grad():
        assert not model(torch.ones(2, 4)).requires_grad


def test_a_backward_that_fails_does_not_disturb_the_next() -> None:
    model, lane = _wrapped()
    output = model(torch.ones(2, 4))
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert len(lane.started) == 1


def test_accumulation_without_no_sync_is_posted_again_once_and_then_learned() -> None:
    model, _ = _wrapped()
    for step in range(3):
        lane = HeldLane()
        model.reducer.begin(lane, 1.0)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        assert model.reducer.post(lane).stale == (step == 0)
        lane.end()


def test_state_dict_keys_are_those_of_torch_s_wrapper_and_both_kinds_can_be_loaded() -> None:
    model, _ = _wrapped()
    assert list(model.state_dict()) == [
        "module.0.weight",
        "module.0.bias",
        "module.1.weight",
        "module.1.bias",
    ]
    model.load_state_dict({key: value * 0 for key, value in model.state_dict().items()})
    assert float(model.module.state_dict()["0.weight"].sum()) == 0
    model.load_state_dict({key: value + 1 for key, value in model.module.state_dict().items()})
    assert float(model.module.state_dict()["0.bias"].sum()) == 4


def test_only_persistent_buffers_travel() -> None:
    manager = PlainManager()
    model = DistributedDataParallel(manager, Block())
    gradients = sum(p.numel() * 4 for p in model.parameters()) + 4 * len(list(model.parameters()))
    assert model.reducer.staging_bytes == gradients + (16 + 16) * 4 + 8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"buffers": "broadcast"}, '"reduce" or "local"'), ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0")],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _wrapped(**changes)
