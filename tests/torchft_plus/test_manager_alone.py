"""A Manager with a real Lighthouse and nobody else: what it refuses, and that one replica is plain training."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn

from lighthouse.server import LighthouseServer
from torchft_plus import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft_plus.manager.outcome import ManagerError


@pytest.fixture
def manager() -> Iterator[Manager]:
    with LighthouseServer(bind="127.0.0.1:0", min_replicas=1, expected_replicas=1) as lighthouse:
        alone = Manager(
            ProcessGroupGloo(),
            lighthouse_addr=lighthouse.address(),
            replica_id="replica_0",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=12),
        )
        yield alone
        alone.shutdown()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_one_replica_alone_is_plain_training_bit_for_bit(manager: Manager) -> None:
    plain = model_of()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), 0.1), 5)
    model = model_of()
    manager.state.register_module("model", model)
    wrapped = DistributedDataParallel(manager, model)
    found = train(wrapped, Optimizer(manager, torch.optim.AdamW(model.parameters(), 0.1)), 5)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert manager.current_step() == 5


def test_averaged_but_unregistered_parameters_are_refused(manager: Manager) -> None:
    DistributedDataParallel(manager, model_of())
    with pytest.raises(ManagerError, match="register_module"):
        manager.start_quorum()


def test_state_behind_torchft_s_callables_counts_as_registered() -> None:
    with LighthouseServer(bind="127.0.0.1:0", min_replicas=1, expected_replicas=1) as lighthouse:
        model = model_of()
        manager = Manager(
            ProcessGroupGloo(),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            lighthouse_addr=lighthouse.address(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=12),
        )
        try:
            DistributedDataParallel(manager, model)
            manager.start_quorum()
            assert manager.should_commit() is True
        finally:
            manager.shutdown()


def test_a_second_backward_in_one_step_is_refused(manager: Manager) -> None:
    model = model_of()
    manager.state.register_module("model", model)
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.zero_grad()
    with wrapped.no_sync():
        wrapped(torch.ones(2, 4)).sum().backward()
    wrapped(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ManagerError, match="no_sync"):
        wrapped(torch.ones(2, 4)).sum().backward()


def test_a_local_objection_leaves_no_trace(manager: Manager) -> None:
    model = model_of()
    manager.state.register_module("model", model)
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), 0.1))
    manager.start_quorum()
    before = manager.state.digest()
    manager.report_error(RuntimeError("a bad batch"))
    wrapped(torch.ones(2, 4)).sum().backward()
    assert manager.should_commit() is False
    assert optimizer.state == {} and manager.state.digest() == before
