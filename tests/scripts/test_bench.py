"""What the bench makes of its measurements, and its hold on the processes that it starts."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import compression, overhead, state_faults_worker, state_steps, state_worker  # noqa: E402
from benchmarks.__main__ import main as bench  # noqa: E402
from benchmarks.__main__ import parse  # noqa: E402
from benchmarks.children import ChildFailed, Worker, environment  # noqa: E402
from benchmarks.figures import quantile, summarize  # noqa: E402
from benchmarks.recovery_log import Journal  # noqa: E402

from lighthouse.messages import Head  # noqa: E402
from torchft_plus.state import StateServer  # noqa: E402

ECHO = """
from benchmarks.channel import Channel
channel = Channel()
print("a stray print does not reach the bench")
while (command := channel.receive()) is not None:
    channel.send(got=command)
"""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_summary_is_ordered_and_within_the_series(values: list[float]) -> None:
    one = summarize(values)
    assert one.least <= one.p10 <= one.median <= one.p90 <= one.most
    assert one.least <= one.median_low <= one.median <= one.median_high <= one.most
    assert (one.least, one.most, one.count) == (min(values), max(values), len(values))


def test_interval_of_the_median_holds_in_19_of_20_series() -> None:
    chance = random.Random(1)
    series = [summarize([chance.gauss(5.0, 2.0) for _ in range(40)]) for _ in range(1000)]
    held = sum(one.median_low <= 5.0 <= one.median_high for one in series)
    assert 930 <= held <= 985


def test_quantile_interpolates() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([7.0], 0.9) == 7.0


def test_ratio_is_paired_by_round() -> None:
    pair = overhead.Pair("torchft_plus", ("plain", "torchft_plus"), [])
    pair.wall_ms = {"plain": [1.0, 10.0, 100.0], "torchft_plus": [1.1, 11.0, 110.0]}
    pair.cpu_ms = pair.faults = pair.wall_ms
    plain, ours = overhead._rows(overhead.WORKLOADS[0], pair)
    assert plain.ratio.median == 1.0
    assert ours.ratio.least == pytest.approx(1.1)
    assert ours.ratio.most == pytest.approx(1.1)


def _journal(gaps: dict[str, list[float]], participants: int = 3) -> Journal:
    journal = Journal()
    for replica_id, own in gaps.items():
        for step, time in enumerate(accumulate(own), 1):
            journal.add(
                replica_id,
                {"time": time, "step": step, "committed": True, "participants": participants, "crc": step},
            )
    return journal


def test_longest_gap_spans_the_kill_and_nothing_before() -> None:
    journal = _journal({"a": [0.0, 5.0, 0.04, 0.04, 0.34, 0.04, 0.04]})
    # 5.0 lies before the last commit before the kill at 5.1
    assert journal.longest_gap_s("a", 5.1, 5.5) == pytest.approx(0.34)
    assert journal.normal_step_s("a", 5.1, count=2) == pytest.approx(0.04)


def test_uncommitted_attempts_make_no_commit() -> None:
    journal = _journal({"a": [1.0]})
    lost = {"time": 1.5, "step": 1, "committed": False, "participants": 2, "crc": None}
    journal.add("a", lost)
    assert [one.step for one in journal.commits("a", 0.0)] == [1]
    assert [one.committed for one in journal.since("a", 1.2)] == [False]
    assert journal.commits("a", 0.0, participants=4) == []


def test_disagreement_is_found() -> None:
    journal = _journal({"a": [1.0, 1.0], "b": [1.0, 1.0]})
    assert journal.disagreements() == (0, 2)
    journal.add("a", {"time": 9.0, "step": 3, "committed": True, "participants": 2, "crc": 1})
    journal.add("b", {"time": 9.0, "step": 3, "committed": True, "participants": 2, "crc": 2})
    assert journal.disagreements() == (1, 3)


def _echo(folder: Path) -> Worker:
    env = environment([ROOT / "scripts"])
    return Worker("echo", [sys.executable, "-c", ECHO], env, folder / "echo.log")


def test_worker_answers_and_ends_with_its_channel(tmp_path: Path) -> None:
    worker = _echo(tmp_path)
    try:
        worker.send(mode="plain", steps=3)
        assert worker.receive(30) == {"got": {"mode": "plain", "steps": 3}}
    finally:
        worker.end()
    assert worker.process.returncode == 0
    assert "a stray print" in (tmp_path / "echo.log").read_text()


def test_killed_worker_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    worker = _echo(tmp_path)
    try:
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(ChildFailed, match=r"echo ended with status -9, see .*echo\.log"):
            worker.receive(30)
        worker.send(mode="plain")  # goes nowhere, raises nothing
    finally:
        worker.end()


def test_settings_of_an_outer_job_do_not_reach_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://elsewhere:1")
    env = environment([ROOT])
    assert "RANK" not in env
    assert "TORCHFT_LIGHTHOUSE" not in env
    assert env["OMP_NUM_THREADS"] == "1"


def test_state_bench_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One small transfer between two processes, with its report."""
    arguments = [
        "state",
        "--parts",
        "transfer",
        "--systems",
        "torchft_plus",
        "--sizes-mb",
        "8",
        "--repeats",
        "1",
    ]
    assert bench([*arguments, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "torchft_plus" in shown
    assert "raw TCP copy" in shown
    entries = {
        entry["mode"]: entry for entry in json.loads((tmp_path / "state.json").read_text())["transfer"]
    }
    assert set(entries) == {"ours", "raw", "memcpy"}
    assert all(entry["gb_s"] > 0 for entry in entries.values())


def test_a_flipped_bit_of_the_bench_is_told() -> None:
    size_bytes = 16 << 20
    server = StateServer(state_worker.plus_registry(state_worker.make_state(size_bytes, filled=True)))
    server.pin(Head(1, 1))
    server.publish(Head(1, 1))
    result = state_faults_worker.fetch_flipped(size_bytes, 1, [server.address], seed=3)
    assert result["right"]
    assert any("damaged" in note for note in result["notes"])
    server.close()


def test_a_deaf_reader_of_the_bench_makes_the_donor_copy_once() -> None:
    result = state_faults_worker.train_while_read(16 << 20, steps=3, stopped_s=0.2)
    assert result["copied_bytes"] >= 8 << 20
    assert len(result["meanwhile_s"]) > 0


def test_steps_are_those_between_the_joiners_first_step_and_its_level() -> None:
    journal = _journal({name: [10.0, *[0.04] * 99] for name in state_steps.SURVIVORS})
    groups = state_steps.Groups(journal, {}, {})
    assert len(groups._gaps_within(10.5, 10.99)) == 2 * 11
    assert len(groups._gaps_that_meet(10.5, 10.99)) == 2 * 13, "the first and the last are in it with a part"
    assert len(groups._gaps_that_meet(5.0, 10.01)) == 2, "what came before the first commit is no step"
    entry = state_steps._entry(
        state_steps.Variant("torchft_plus", throttled=True, compute="device"),
        [
            {
                "normal_s": [0.04],
                "during_s": [0.05, worst],
                "three_s": [0.05],
                "join_s": 1.0,
                "steps_that_differ": 0,
            }
            for worst in (0.05, 0.06, 0.08)
        ],
    )
    assert entry["during_ms"][2] == pytest.approx(80)
    _, header, (row,) = state_steps.table([entry])
    cells = dict(zip(header, row, strict=True))
    assert (cells["compute"], cells["link"], cells["steps meanwhile"]) == ("device", "throttled", "3 x 1")
    assert cells["p50, p95 of two"] == "1.25 x, 1.88 x"
    assert cells["p50, p95 of three"] == "1.00 x, 1.50 x"
    assert cells["worst step of a join ms, median"] == "60"


def test_a_throttled_download_takes_about_so_many_steps_of_either_workload() -> None:
    for compute, workload in state_steps.WORKLOADS.items():
        for system, donors in (("torchft_plus", 2), ("torchft", 1)):
            variant = state_steps.Variant(system, throttled=True, compute=compute)
            download_s = variant.size_bytes / (donors * variant.link_bytes_per_s)
            assert 20 < download_s / workload.device_time_s < 27
    free = [state_steps.Variant("torchft", throttled=False, compute=one) for one in state_steps.WORKLOADS]
    assert [one.link_bytes_per_s for one in free] == [0, 0]


def test_a_device_is_emulated_by_a_wait_that_leaves_the_processors_to_others() -> None:
    """The model, and so the gradients and all that is done with them, is the same."""
    cpu, device = state_steps.WORKLOADS["cpu"], state_steps.WORKLOADS["device"]
    assert (device.widths, device.adam) == (cpu.widths, cpu.adam)
    assert device.batch < cpu.batch
    assert device.device_time_s > cpu.device_time_s


def test_compressed_syncs_take_fewer_bytes_and_are_equal_everywhere(tmp_path: Path) -> None:
    options = parse(["compression", "--rounds", "2", "--sizes", "2", "--width", "64", "--layers", "1"])
    options.scratch = tmp_path
    result = compression.measure(options, None)
    assert compression.failures(result) == []
    (_, header, rows), *_ = compression.tables(result)
    share = {row[0]: float(row[header.index("of fp32")]) for row in rows}
    assert share["fp32"] == 1.0
    assert share["bf16"] == pytest.approx(0.5, abs=0.03)
    assert share["int8"] == share["fp8"] == pytest.approx(0.254, abs=0.03)
    error = {row[0]: float(row[header.index("relative error")]) for row in rows}
    assert error["fp32"] < 1e-6 < error["bf16"] < error["int8"] < error["fp8"] < 0.1
    result["groups"]["2"][1]["int8"]["digest"] = "another"
    assert compression.failures(result) == ["int8 with 2 groups: the members' results differ"]
