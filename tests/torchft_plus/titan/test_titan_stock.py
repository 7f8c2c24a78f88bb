"""TorchTitan's own fault-tolerant trainer, unmodified, on our engine: a killed group comes back and is equal, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan", allow_module_level=True)

from titan_runs import Runs, free_port

pytestmark = [pytest.mark.titan, pytest.mark.long, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).with_name("stock_titan.py")
STEPS = 200


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()


def start(runs: Runs, replica: int) -> Any:
    return runs._start(
        f"stock{replica}",
        [sys.executable, str(SCRIPT)],
        STOCK_FOLDER=str(runs.folder),
        STOCK_REPLICA=str(replica),
        STOCK_STEPS=str(STEPS),
        STOCK_RESULT=str(runs.folder / f"stock{replica}.json"),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        TORCHFT_LIGHTHOUSE=runs.lighthouse_address,
        TORCHFT_PLUS_EVENTS=str(runs.folder / "events"),
    )


def test_the_stock_trainer_survives_a_kill_and_heals(runs: Runs) -> None:
    runs.start_lighthouse(expected=2)
    survivor, victim = start(runs, 0), start(runs, 1)
    runs.until(lambda: len(runs.events("torchtitan_ft_1", "commit")) >= 8, 120, "eight steps")
    victim.kill()
    victim.wait()
    back = start(runs, 1)
    assert [survivor.wait(200), back.wait(60)] == [0, 0], runs.tails()
    results = [json.loads((runs.folder / f"stock{replica}.json").read_text()) for replica in range(2)]
    assert results[0] == results[1]
    assert results[0]["step"] == STEPS
    assert runs.events("torchtitan_ft_0", "refused") == []
    together = [event for event in runs.events("torchtitan_ft_1", "commit") if event["contributors"] == 2]
    assert len(together) > 20  # it came back early enough to show something
