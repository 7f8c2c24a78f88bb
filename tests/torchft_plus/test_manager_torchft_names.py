"""A Manager as torchft's scripts use it: two of them, in threads, with a real Lighthouse and real gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from torchft_plus import ManagedProcessGroup, Manager, Optimizer
from torchft_plus.coordination import LighthouseServer
from torchft_plus.manager import WorldSizeMode
from torchft_plus.manager.settings import SettingsError
from torchft_plus.process_group import FakeProcessGroupWrapper, ProcessGroupGloo


def both(run: Callable[[Manager, FakeProcessGroupWrapper, int], Any], **options: Any) -> list[Any]:
    """Let two groups ``run``; what they return."""
    lighthouse = LighthouseServer("127.0.0.1:0", 2)

    def one(rank: int) -> Any:
        pg = FakeProcessGroupWrapper(ProcessGroupGloo(timeout=timedelta(seconds=10)))
        manager = Manager(
            pg,
            None,
            None,
            2,
            True,
            timedelta(seconds=15),
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse.address(),
            replica_id=f"replica_{rank}",
            **options,
        )
        try:
            return run(manager, pg, rank)
        finally:
            manager.shutdown()

    try:
        with ThreadPoolExecutor(2) as pool:
            return [run.result(60) for run in [pool.submit(one, rank) for rank in range(2)]]
    finally:
        lighthouse.shutdown()


def test_a_lane_that_breaks_during_the_backward_is_told_though_no_peer_is_dead() -> None:
    def run(manager: Manager, pg: FakeProcessGroupWrapper, rank: int) -> list[float]:
        found: list[float] = []
        for step in range(3):
            manager.start_quorum()
            if step == 1:
                pg.report_future_error(RuntimeError("on demand"))
            tensor = torch.tensor([1.0 + rank + step])
            manager.allreduce(tensor).wait()
            assert manager.should_commit()
            found.append(float(tensor))
        return [*found, manager.batches_committed()]

    started = time.monotonic()
    assert both(run) == [[1.5, 2.5, 3.5, 6]] * 2
    assert time.monotonic() - started < 14  # the deadline of a step, which would name an innocent one


def test_a_result_is_there_at_once_also_in_the_first_step() -> None:
    """Who looks at it before the vote (to clip, say) must see the same on every replica."""

    def run(manager: Manager, pg: FakeProcessGroupWrapper, rank: int) -> tuple[float, bool]:
        manager.start_quorum()
        tensor = torch.tensor([1.0 + rank])
        manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        seen = float(tensor)
        assert manager.should_commit()
        assert not manager.results_changed
        outside = torch.tensor([5.0 + rank])
        manager.allreduce(outside).wait()
        return seen, float(outside) == 5.0 + rank

    assert both(run) == [(3.0, True)] * 2


def test_gradients_that_no_hook_reduces_are_averaged_all_the_same() -> None:
    def run(manager: Manager, pg: FakeProcessGroupWrapper, rank: int) -> list[float]:
        ManagedProcessGroup(manager)
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
        return model.weight.flatten().tolist()

    first, second = both(run)
    assert first == second


def test_a_state_dict_of_a_manager_says_where_it_stands() -> None:
    def run(manager: Manager, pg: FakeProcessGroupWrapper, rank: int) -> int:
        manager.load_state_dict({"step": 7, "batches_committed": 14})
        manager.start_quorum()
        assert manager.should_commit()
        saved = manager.state_dict()
        assert (saved["step"], saved["batches_committed"]) == (8, 14 + manager.num_participants())
        return saved["quorum_id"]

    first, second = both(run)
    assert first == second > 0


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(SettingsError, match="only DYNAMIC is offered"):
        Manager(ProcessGroupGloo(), world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
