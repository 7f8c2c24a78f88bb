from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

from lighthouse.server import LighthouseServer
from torchft_plus import Manager, ProcessGroupGloo


def _train(address: str, rank: int) -> list[list[float]]:
    manager = Manager(
        ProcessGroupGloo(),
        min_replica_size=2,
        lighthouse_addr=address,
        replica_id=f"replica_{rank}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=12),
    )
    results: list[list[float]] = []
    try:
        for step in range(3):
            manager.start_quorum()
            tensor = torch.linspace(-1, 1, 700) * (rank + 1 + step)
            total = torch.full((5,), rank + 1.0)
            works = [
                manager.allreduce(tensor, should_quantize=True),
                manager.allreduce(total, reduce_op=ReduceOp.SUM),
            ]
            for work in works:
                work.wait()
            assert manager.should_commit()
            results.append([*tensor.tolist(), *total.tolist()])
    finally:
        manager.shutdown()
    return results


def test_a_quantised_average_is_equal_everywhere_and_near_the_exact_one() -> None:
    with (
        LighthouseServer(bind="127.0.0.1:0", min_replicas=2, expected_replicas=2) as lighthouse,
        ThreadPoolExecutor(2) as pool,
    ):
        runs = [pool.submit(_train, lighthouse.address(), rank) for rank in range(2)]
        first, second = (run.result(60) for run in runs)
    assert first == second
    for step, found in enumerate(first):
        exact = torch.linspace(-1, 1, 700) * (1.5 + step)
        assert found[:-5] == pytest.approx(exact.tolist(), abs=(3 + 2 * step) / 100)
        assert found[:-5] != exact.tolist()
        assert found[-5:] == [3.0] * 5
