"""Catch-up: a joiner that records and replays holds the same bits as a replica that was never away."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from state_replicas import InBackground, MakeOptimizer, Replica, fetch, head_at, make_replica, serve
from torch import optim

from torchft_plus.state import CatchUp, FetchReport, StateError, StateServer
from torchft_plus.state.catch_up import _save_gradient

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(optim.AdamW, lr=0.1),
    "adamw foreach": partial(optim.AdamW, lr=0.1, foreach=True),
    "adamw fused": partial(optim.AdamW, lr=0.1, fused=True),
    "adamw amsgrad": partial(optim.AdamW, lr=0.1, amsgrad=True),
    "adamw tensor lr": lambda groups: optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
    "adam": partial(optim.Adam, lr=0.1),
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "sgd nesterov foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "nadam": partial(optim.NAdam, lr=0.1),
    "radam": partial(optim.RAdam, lr=0.1),
    "adamax": partial(optim.Adamax, lr=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1),
    "rprop": partial(optim.Rprop, lr=0.1),
    "adafactor": partial(optim.Adafactor, lr=0.1),
    "muon": partial(optim.Muon, lr=0.1),
}


def _make(seed: int, name: str) -> Replica:
    def build(groups: list[dict[str, object]]) -> optim.Optimizer:
        if name == "rprop":
            for group in groups:
                group.pop("weight_decay", None)
        return OPTIMIZERS[name](groups)

    return make_replica(seed, build, bias=name != "muon")


@pytest.fixture(name="donor_and_joiner", params=list(OPTIMIZERS))
def _donor_and_joiner(request: pytest.FixtureRequest) -> Iterator[tuple[Replica, StateServer, Replica]]:
    donor, joiner = _make(1, request.param), _make(2, request.param)
    donor.train(1, 6)
    server = StateServer(donor.registry)
    yield donor, server, joiner
    server.close()


def _step_together(
    donor: Replica, server: StateServer, joiner: Replica, catch_up: CatchUp, step: int
) -> None:
    """A committed step: a level donor, a joiner that is behind."""
    donor.backward(step)
    joiner.take_gradients(donor)
    server.before_update()
    donor.step()
    catch_up.record([joiner.optimizer], head_at(step))
    joiner.scheduler.step()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*", "ignore:.*epoch parameter.*")
def test_bit_identical_for_every_optimizer(donor_and_joiner: tuple[Replica, StateServer, Replica]) -> None:
    donor, server, joiner = donor_and_joiner
    catch_up = CatchUp(joiner.registry, max_steps=10)
    catch_up.begin(head_at(6))
    serve(server, head_at(6))
    transfer = InBackground(lambda: fetch(joiner.registry, head_at(6), server.address))
    assert catch_up.take_values(10_000)
    assert joiner.scheduler.state_dict() == donor.scheduler.state_dict()
    for step in range(7, 12):
        _step_together(donor, server, joiner, catch_up, step)
    report = transfer.result()
    assert isinstance(report, FetchReport)
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in joiner.groups()]
    assert catch_up.replay(report)
    for was, parameter in zip(before, joiner.groups(), strict=True):
        assert (was is None and parameter.grad is None) or torch.equal(was, parameter.grad)  # type: ignore[arg-type]
    assert joiner.registry.digest() == donor.registry.digest()
    for step in range(12, 15):
        donor.train(step, step)
        joiner.train(step, step)
        assert joiner.registry.digest() == donor.registry.digest()


def _behind(steps: int, max_steps: int = 10) -> tuple[Replica, StateServer, Replica, CatchUp, FetchReport]:
    """A joiner that has recorded ``steps`` steps after version 6, and that version."""
    donor, joiner = make_replica(1), make_replica(2)
    donor.train(1, 6)
    server = StateServer(donor.registry)
    serve(server, head_at(6))
    catch_up = CatchUp(joiner.registry, max_steps)
    catch_up.begin(head_at(6))
    report = fetch(joiner.registry, head_at(6), server.address)
    assert catch_up.take_values(0)
    for step in range(7, 7 + steps):
        _step_together(donor, server, joiner, catch_up, step)
    return donor, server, joiner, catch_up, report


def test_controls_fail_as_they_must() -> None:
    """Without one gradient, or with the last options for all steps, the bits differ: the comparison can
    fail."""
    for spoil in ("gradient", "options"):
        donor, server, joiner, catch_up, report = _behind(5)
        steps = catch_up._steps
        if spoil == "gradient":
            steps[2].updates[0].gradients[0].local.zero_()  # type: ignore[union-attr]
        else:
            for step in steps:
                for recorded, last in zip(step.updates[0].options, steps[-1].updates[0].options, strict=True):
                    recorded["lr"] = last["lr"]
        assert catch_up.replay(report)
        assert joiner.registry.digest() != donor.registry.digest(), spoil
        server.close()


def test_replay_in_parts_while_steps_are_recorded() -> None:
    donor, server, joiner, catch_up, report = _behind(4)
    assert not catch_up.replay(report, budget_ms=0)
    assert catch_up.recorded_steps == 2
    _step_together(donor, server, joiner, catch_up, 11)
    while not catch_up.replay(report, budget_ms=0):
        pass
    assert catch_up.size_bytes == 0
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_a_replay_without_time_to_spare_comes_to_an_end() -> None:
    """At each boundary a step is recorded, and two are replayed however long they take."""
    donor, server, joiner, catch_up, report = _behind(8)
    for boundary in range(20):
        if catch_up.nearly_level:
            break
        catch_up.replay(report, budget_ms=0)
        _step_together(donor, server, joiner, catch_up, 15 + boundary)
    assert boundary == 6
    assert catch_up.replay(report)
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_a_later_version_of_the_queue_will_do() -> None:
    donor, joiner = make_replica(1), make_replica(2)
    donor.train(1, 6)
    server = StateServer(donor.registry)
    catch_up = CatchUp(joiner.registry, 10)
    catch_up.begin(head_at(6))
    serve(server, head_at(6))
    fetch(joiner.registry, head_at(6), server.address)
    assert catch_up.take_values(0)
    for step in range(7, 10):
        _step_together(donor, server, joiner, catch_up, step)
    serve(server, head_at(9))
    later = fetch(joiner.registry, head_at(9), server.address)
    for step in range(10, 12):
        _step_together(donor, server, joiner, catch_up, step)
    assert catch_up.replay(later)
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_skipped_steps_several_optimizers_and_no_warning_of_schedulers() -> None:
    def pair(seed: int) -> Replica:
        replica = make_replica(seed)
        second = optim.SGD([replica.net.sometimes], lr=0.01, momentum=0.5)
        replica.registry.register_optimizer("second", second)
        replica.second = second  # type: ignore[attr-defined]
        return replica

    donor, joiner = pair(1), pair(2)
    server = StateServer(donor.registry)
    serve(server, head_at(0))
    catch_up = CatchUp(joiner.registry, 5)
    catch_up.begin(head_at(0))
    report = fetch(joiner.registry, head_at(0), server.address)
    assert catch_up.take_values(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        for step in (1, 2, 3):
            donor.backward(step)
            joiner.take_gradients(donor)
            if step == 2:
                catch_up.record([], head_at(step))
                continue
            donor.optimizer.step()
            donor.second.step()  # type: ignore[attr-defined]
            catch_up.record([joiner.optimizer, joiner.second], head_at(step))  # type: ignore[attr-defined]
            for replica in (donor, joiner):
                replica.scheduler.step()
    assert catch_up.recorded_steps == 3
    assert catch_up.size_bytes > 0
    server.before_update()
    assert catch_up.replay(report)
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_overflow_names_the_number_to_raise_once() -> None:
    _, server, joiner, catch_up, report = _behind(2, max_steps=2)
    size_bytes = catch_up.size_bytes
    # One of the two steps leaves a parameter unused, which then has no gradient.
    assert joiner.registry.gradient_bytes() < size_bytes <= 2 * joiner.registry.gradient_bytes()
    with pytest.raises(
        StateError, match=rf"more than 2 steps \({size_bytes / 1e6:.1f} MB .*raise catch_up_max_steps"
    ):
        catch_up.record([joiner.optimizer], head_at(9))
    catch_up.record([joiner.optimizer], head_at(10))
    assert catch_up.size_bytes == 0
    assert catch_up.peak == (2, size_bytes)
    with pytest.raises(StateError, match="too many steps"):
        catch_up.replay(report)
    assert not joiner.registry.holds_state
    server.close()


def test_order_of_calls_is_enforced() -> None:
    donor, server, joiner, catch_up, report = _behind(1)
    fresh = CatchUp(joiner.registry, 3)
    with pytest.raises(StateError, match="not begun"):
        fresh.take_values(0)
    fresh.begin(head_at(7))
    assert not fresh.take_values(0), "the manifest of another head must not be taken"
    with pytest.raises(StateError, match="before take_values"):
        fresh.record([joiner.optimizer])
    with pytest.raises(StateError, match="never taken"):
        fresh.replay(report)
    with pytest.raises(StateError, match="max_steps"):
        CatchUp(joiner.registry, 0)
    catch_up.begin(head_at(5))
    assert not catch_up.values_taken
    server.close()
    assert donor.registry.holds_state


class CountsInOptions(optim.SGD):
    """An optimizer that keeps a counter among its options, as some outside of torch.optim do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["calls"])


def test_counters_among_the_options_go_on() -> None:
    donor = make_replica(1, lambda groups: CountsInOptions(groups, lr=0.1))
    joiner = make_replica(2, lambda groups: CountsInOptions(groups, lr=0.1))
    donor.train(1, 6)
    server = StateServer(donor.registry)
    serve(server, head_at(6))
    catch_up = CatchUp(joiner.registry, 5)
    catch_up.begin(head_at(6))
    report = fetch(joiner.registry, head_at(6), server.address)
    assert catch_up.take_values(0)
    for step in (7, 8, 9):
        _step_together(donor, server, joiner, catch_up, step)
    assert catch_up.replay(report)
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_without_pinned_memory_a_gradient_is_copied_into_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchft_plus.state.catch_up.lies_on_host", lambda tensor: False)
    gradient = torch.arange(12.0).view(3, 4).t()
    saved = _save_gradient(gradient)
    assert saved is not None
    gradient.zero_()
    assert torch.equal(saved.restore(), torch.arange(12.0).view(3, 4).t())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
def test_a_gradient_is_saved_before_a_busy_gpu_writes_it_again() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    gradient = torch.zeros(1 << 22, device="cuda")
    for step in range(1, 4):
        for _ in range(20):
            busy = busy @ busy / 64
        gradient.fill_(step)
        saved = _save_gradient(gradient)
        gradient.fill_(-1)
        assert saved is not None
        assert bool((saved.restore() == step).all())
