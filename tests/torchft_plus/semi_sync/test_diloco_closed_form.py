"""The mathematics of DiLoCo, by hand: one replica with a real Manager, one or two parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn

from lighthouse.server import LighthouseServer
from torchft_plus import DiLoCo, LocalSGD, Manager, Optimizer, ProcessGroupGloo

MakeManager = Callable[[], Manager]


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    managers: list[Manager] = []
    with LighthouseServer(bind="127.0.0.1:0", min_replicas=1, expected_replicas=1) as lighthouse:

        def make() -> Manager:
            managers.append(
                Manager(
                    ProcessGroupGloo(),
                    lighthouse_addr=lighthouse.address(),
                    replica_id=f"replica_{len(managers)}",
                    job_id=f"job_{len(managers)}",
                    rank=0,
                    world_size=1,
                    timeout=timedelta(seconds=12),
                )
            )
            return managers[-1]

        yield make
        for manager in managers:
            manager.shutdown()


class Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))


def descend(optimizer: torch.optim.Optimizer, *parameters: nn.Parameter) -> None:
    """An inner step with gradient 1: with SGD and learning rate r, each parameter falls by r."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def sgd(module: nn.Module, lr: float, **more: float | bool) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr, **more)


def test_one_parameter_by_hand(make_manager: MakeManager) -> None:
    """10 falls by 1 in each of 2 inner steps; the outer step takes half of that difference from the global copy."""
    model = Scalar(10.0)
    manager, inner = make_manager(), sgd(model, 1.0)
    with DiLoCo(manager, [model], inner, sgd(model, 0.5), sync_every=2):
        descend(inner, model.weight)
        assert (model.weight.item(), manager.current_step()) == (9.0, 0)
        descend(inner, model.weight)
        assert (model.weight.item(), manager.current_step()) == (9.0, 1)  # 10 - 0.5 * 2
        descend(inner, model.weight)
        descend(inner, model.weight)
        assert (model.weight.item(), manager.current_step()) == (8.0, 2)


@pytest.mark.parametrize(
    ("nesterov", "expected"),
    # v1 = d, v2 = 0.5 d + d; plain: w -= v; nesterov: w -= d + 0.5 v. With d = 2 and learning rate 1.
    [(False, [8.0, 5.0]), (True, [7.0, 3.5])],
)
def test_outer_momentum(make_manager: MakeManager, nesterov: bool, expected: list[float]) -> None:
    model = Scalar(10.0)
    inner = sgd(model, 1.0)
    outer = sgd(model, 1.0, momentum=0.5, nesterov=nesterov)
    found: list[float] = []
    with DiLoCo(make_manager(), [model], inner, outer, sync_every=2):
        for _ in expected:
            descend(inner, model.weight)
            descend(inner, model.weight)
            found.append(model.weight.item())
    assert found == expected


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 9.0), (0.5, 8.5), (1.0, 8.0)])
def test_alpha_is_the_share_of_the_local_parameters(
    make_manager: MakeManager, alpha: float, expected: float
) -> None:
    model = Scalar(10.0)
    inner = sgd(model, 1.0)
    with DiLoCo(make_manager(), [model], inner, sgd(model, 0.5), sync_every=2, fragment_update_alpha=alpha):
        descend(inner, model.weight)
        descend(inner, model.weight)
    assert model.weight.item() == expected


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 9.0), (0.5, 8.0), (1.0, 7.0)])
def test_a_delayed_sync_uses_the_pseudo_gradient_of_when_it_was_sent(
    make_manager: MakeManager, alpha: float, expected: float
) -> None:
    """Sent after 2 of 3 steps: the difference is 2, whatever the third step does."""
    model = Scalar(10.0)
    inner = sgd(model, 1.0)
    with DiLoCo(
        make_manager(),
        [model],
        inner,
        sgd(model, 0.5),
        sync_every=3,
        fragment_sync_delay=1,
        fragment_update_alpha=alpha,
    ):
        for _ in range(3):
            descend(inner, model.weight)
    assert model.weight.item() == expected


def test_two_fragments_take_turns(make_manager: MakeManager) -> None:
    """Each is synchronised every 4 inner steps, the first one 2 before the other; the global copy of the other waits."""
    model = nn.ModuleList([Scalar(10.0), Scalar(20.0)])
    one, two = model[0], model[1]
    assert isinstance(one, Scalar) and isinstance(two, Scalar)
    inner = sgd(model, 1.0)
    manager = make_manager()
    seen: list[tuple[float, float]] = []
    with DiLoCo(manager, [one, two], inner, [sgd(one, 0.5), sgd(two, 0.5)], sync_every=4):
        for _ in range(8):
            descend(inner, one.weight, two.weight)
            seen.append((one.weight.item(), two.weight.item()))
    # one: 10 -> local 8, global 10 - 0.5*2 = 9; then 4 steps to 5, global 9 - 0.5*4 = 7
    # two: 20 -> 4 steps to 16, global 20 - 0.5*4 = 18; then 4 steps to 14, global 16
    assert seen[1] == (9.0, 18.0) and seen[3] == (7.0, 18.0)
    assert seen[5] == (7.0, 16.0) and seen[7] == (5.0, 16.0)
    assert manager.current_step() == 4


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step % 3))).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_one_replica_with_outer_learning_rate_1_is_plain_training(make_manager: MakeManager) -> None:
    plain = network()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), 0.01), 12)
    model = network()
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    with DiLoCo(make_manager(), [model], inner, sgd(model, 1.0), sync_every=3):
        found = train(model, inner, 12)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_local_sgd_alone_is_plain_training(make_manager: MakeManager) -> None:
    plain = network()
    expected = train(plain, torch.optim.SGD(plain.parameters(), 0.1), 6)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with LocalSGD(make_manager(), model, optimizer, sync_every=2):
        found = train(model, optimizer, 6)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_not_finite_leave_no_trace(make_manager: MakeManager) -> None:
    """Nobody is there to contribute, so the sync is skipped, and the model goes on from the global copy."""
    model = Scalar(10.0)
    inner = sgd(model, 1.0)
    manager = make_manager()
    with DiLoCo(manager, [model], inner, sgd(model, 0.5, momentum=0.9), sync_every=2):
        model.weight.grad = torch.full_like(model.weight, float("nan"))
        inner.step()
        descend(inner, model.weight)
        assert (model.weight.item(), manager.current_step()) == (10.0, 1)
        descend(inner, model.weight)
        descend(inner, model.weight)
        assert model.weight.item() == 9.0


def test_what_is_not_finite_in_one_fragment_does_not_come_back_by_another(make_manager: MakeManager) -> None:
    """A forward reads all fragments, and moments of the inner optimizer remember: all of them start afresh."""
    model = nn.ModuleList([Scalar(10.0), Scalar(20.0)])
    one, two = model[0], model[1]
    assert isinstance(one, Scalar) and isinstance(two, Scalar)
    inner = sgd(model, 1.0, momentum=0.5)
    with DiLoCo(make_manager(), [one, two], inner, [sgd(one, 0.5), sgd(two, 0.5)], sync_every=4):
        for bad in (True, False, False, False, False, False, False, False):
            for parameter in (one.weight, two.weight):
                parameter.grad = one.weight.detach() * two.weight.detach() * 0 + 1
            if bad:
                two.weight.grad = torch.full_like(two.weight, float("nan"))
                one.weight.grad = two.weight.grad.clone()
            inner.step()
        assert torch.isfinite(one.weight).all() and torch.isfinite(two.weight).all()
        assert one.weight.item() < 10.0, "it trains on"


def test_a_checkpoint_brings_back_global_copy_and_momentum(make_manager: MakeManager) -> None:
    def run(model: Scalar, syncs: int, saved: dict[str, object] | None) -> dict[str, object]:
        inner, outer = sgd(model, 1.0), sgd(model, 0.5, momentum=0.9, nesterov=True)
        diloco = DiLoCo(make_manager(), [model], inner, outer, sync_every=2)
        if saved is not None:
            diloco.load_state_dict(saved)
        with diloco:
            for _ in range(2 * syncs):
                descend(inner, model.weight)
        return diloco.state_dict()

    straight = Scalar(10.0)
    run(straight, 5, None)
    saved = run(Scalar(10.0), 2, None)
    resumed = Scalar(-1.0)
    run(resumed, 3, saved)
    assert resumed.weight.item() == straight.weight.item()


def test_a_run_that_goes_on_from_a_checkpoint_loses_no_window_of_any_fragment(
    make_manager: MakeManager,
) -> None:
    """All groups begin anew there, so the first turn of a fragment comes early, as at step 0: it counts all the same."""
    manager = make_manager()
    manager.load_state_dict({"step": 2, "batches_committed": 4})
    model = nn.ModuleList([Scalar(10.0), Scalar(20.0)])
    one, two = model[0], model[1]
    assert isinstance(one, Scalar) and isinstance(two, Scalar)
    inner = sgd(model, 1.0)
    with DiLoCo(manager, [one, two], inner, [sgd(one, 0.5), sgd(two, 0.5)], sync_every=4):
        for _ in range(4):
            descend(inner, one.weight, two.weight)
    assert (one.weight.item(), two.weight.item()) == (7.0, 18.0)
    assert manager.current_step() == 4


def test_tied_and_frozen_parameters(make_manager: MakeManager) -> None:
    first, second = Scalar(1.0), Scalar(2.0)
    second.tied = first.weight
    second.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    manager = make_manager()
    inner = torch.optim.SGD([first.weight, second.weight], lr=1.0)
    with DiLoCo(manager, [first, second], inner, [sgd(first, 0.5), sgd(second, 0.5)], sync_every=2):
        for _ in range(2):
            descend(inner, first.weight, second.weight)
    assert first.weight.item() == -0.5  # 1 falls to 0 and is taken to 0.5; then comes the other's turn
    assert second.weight.item() == 1.0
    assert "frozen_parameters/1.frozen" in dict(manager.state.snapshot().entries)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inner_optimizer": "wrapped"}, "vote on every inner step"),
        ({"sync_every": 0}, "sync_every is 0"),
        ({"outer_optimizer": []}, "0 outer optimizers for 1 fragments"),
        ({"outer_optimizer": "stranger"}, "not in its fragment"),
        ({"outer_optimizer": "partial"}, "are not in its outer optimizer"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha is 1.5"),
        ({"backup_device": torch.device("meta")}, "backup_device is meta"),
        ({"sync_seconds": 0}, "sync_seconds is 0"),
        ({"sync_seconds": 1, "sync_least_groups": 0}, "sync_least_groups is 0"),
        ({"sync_seconds": 1, "sync_grace_seconds": -1}, "sync_grace_seconds is -1"),
        ({"sync_grace_seconds": 1}, "sync_seconds, which is not set"),
        ({"model_fragments": [nn.ReLU()]}, "no trainable parameter"),
        ({"codec": "int4"}, "int4"),
        ({"error_feedback": True}, "without a codec"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_manager: MakeManager, change: dict[str, object], sentence: str
) -> None:
    model = network()
    manager = make_manager()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    named = {
        "wrapped": lambda: Optimizer(manager, inner),
        "stranger": lambda: sgd(network(1), 0.1),
        "partial": lambda: torch.optim.SGD(list(model.parameters())[:1], 0.1),
    }
    arguments: dict[str, object] = {
        "model_fragments": [model],
        "inner_optimizer": inner,
        "outer_optimizer": sgd(model, 0.5),
        "sync_every": 2,
    }
    for key, value in change.items():
        arguments[key] = named[value]() if isinstance(value, str) and value in named else value
    with pytest.raises(ValueError, match=sentence):
        DiLoCo(manager, **arguments)  # type: ignore[arg-type]
