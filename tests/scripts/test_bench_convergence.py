"""``scripts/bench convergence`` and ``windows``: what they make of runs, and short runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import convergence, plots, windows  # noqa: E402
from benchmarks.__main__ import main, parse  # noqa: E402


def _runs() -> dict[str, object]:
    run = {"commits": 50, "lost": 0, "seconds": 9.0, "contributors": {80: 4, 240: 3}, "batches": 240}
    runs = [
        {
            **run,
            "mode": mode,
            "seed": seed,
            "kills": 2 * ("kills" in mode),
            "final": 1.5 + seed,
            "losses": {80: 3.0, 240: 2.0},
        }
        for mode in convergence.MODES
        for seed in (1, 2)
    ]
    return {"runs": runs, "batches": 240, "kill_every_s": 5.0}


def test_convergence_table_and_failures() -> None:
    result = _runs()
    ((_, header, rows),) = convergence.tables(result)
    assert len(rows) == 4 and all(len(row) == len(header) for row in rows)
    assert rows[2][:6] == ["DiLoCo, kills", "3.0000", "2.5000 to 3.5000", "0.12 M", "50, 50", "2, 2"]
    assert convergence.failures(result) == []
    assert convergence._at({80: 3.0, 240: 2.0}, 160) == 2.5
    assert convergence._at({80: 3.0, 240: 2.0}, 20) == 3.0


def test_convergence_plot_is_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.save(convergence.draw(_runs()), tmp_path / "plot.png")
    assert 0 < (tmp_path / "plot.png").stat().st_size < 200_000


def test_a_quick_convergence_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "GROUPS", 2)
    arguments = ["convergence", "--quick", "--modes", "diloco", "--batches", "1600", "--step-s", "0.01"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "convergence.md").read_text()
    assert "| DiLoCo, undisturbed |" in text


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_do_not_lose_steps_in_a_convergence_run(tmp_path: Path) -> None:
    options = parse(
        ["convergence", "--seeds", "1", "--modes", "diloco-kills", "steps-kills", "--out", str(tmp_path)]
    )
    options.kill_every, options.batches, options.scratch = 5.0, 1600, str(tmp_path / "scratch")
    result = convergence.measure(options, None)
    assert convergence.failures(result) == []
    assert all(run["kills"] for run in result["runs"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_survivor_of_a_death_in_a_sync_loses_nothing(tmp_path: Path) -> None:
    options = parse(["windows", "--kills", "1", "--systems", "torchft_plus", "--out", str(tmp_path)])
    options.scratch = str(tmp_path / "scratch")
    result = windows.measure(options, None)
    assert windows.failures(result) == []
