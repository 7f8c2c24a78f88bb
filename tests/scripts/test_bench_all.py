"""``scripts/bench all`` and ``report``: the arguments of each bench, deadlines, and the page made of recorded figures."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import page, report, run_all, state_steps, summary, supervised  # noqa: E402
from benchmarks.__main__ import main, parse  # noqa: E402
from benchmarks.about import About, command_line  # noqa: E402
from benchmarks.benches import BENCHES  # noqa: E402
from benchmarks.budgets import BUDGETS  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
ABOUT = {
    "time": "2026-01-02 03:04:05 UTC",
    "command": "scripts/bench x",
    "cpu": "a CPU",
    "cores": 2,
    "torch": "2.13",
}


# --- all ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(BENCHES))
@pytest.mark.parametrize("quick", [False, True])
def test_each_bench_takes_the_arguments_of_the_budget(name: str, quick: bool) -> None:
    options = parse(run_all.bench_arguments(name, quick=quick))
    assert options.command == name
    assert ("torchft" in options.systems) == BUDGETS[name].torchft


def test_budgets_lines_and_plots_are_of_benches_that_exist() -> None:
    assert set(BUDGETS) == set(BENCHES)
    assert set(summary.LINES) <= set(BENCHES)
    assert set(page.DRAWINGS) <= set(BENCHES)


def test_quick_figures_go_elsewhere_and_never_into_the_docs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(["all", "--quick", "--out", str(tmp_path)]).out == tmp_path / "quick"
    assert parse(["all", "--out", str(tmp_path)]).out == tmp_path
    with pytest.raises(SystemExit):
        parse(["all", "--quick", "--docs"])
    assert "leave out --docs" in capsys.readouterr().err


DRIVER = """
import json, sys
from pathlib import Path
from benchmarks import supervised
supervised.INTERRUPT_S = 1.0
deadline_s, log, *command = sys.argv[1:]
ending = supervised.run("it", command, {}, Path(log), float(deadline_s))
print(json.dumps([ending.status, ending.timed_out, ending.left_behind]))
"""

PARENT = """
import signal, subprocess, sys, time
from pathlib import Path
deaf, pids, seconds = sys.argv[1:]
if deaf == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path(pids).write_text(str(child.pid))
print("started", flush=True)
time.sleep(float(seconds))
"""


def _supervise(folder: Path, deadline_s: float, deaf: str, seconds: float) -> tuple[list[Any], int]:
    """Run a parent whose child is in a session of its own. Returns the ending and the id of that child."""
    pids = folder / "pids"
    command = [sys.executable, "-c", DRIVER, str(deadline_s), str(folder / "log")]
    command += [sys.executable, "-c", PARENT, deaf, str(pids), str(seconds)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=90, check=True)
    return json.loads(done.stdout), int(pids.read_text())


@pytest.mark.parametrize("deaf", ["deaf", "hearing"])
def test_a_bench_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, deaf: str) -> None:
    (status, timed_out, left_behind), child = _supervise(tmp_path, 8.0, deaf, 600.0)
    assert timed_out
    assert status != 0
    assert left_behind == 1
    assert not Path(f"/proc/{child}").exists()
    assert ("KeyboardInterrupt" in (tmp_path / "log").read_text()) == (deaf == "hearing")


def test_what_outlives_a_bench_is_ended_before_the_next(tmp_path: Path) -> None:
    ending, child = _supervise(tmp_path, 60.0, "hearing", 0.0)
    assert ending == [0, False, 1]
    assert not Path(f"/proc/{child}").exists()


FAILING = """
import sys
from benchmarks import __main__, budgets
table = budgets.BUDGETS
table["convergence"] = budgets.Budget(("--no-such-option",), 60.0, (), torchft=False)
small = ("--rounds", "1", "--sizes", "2", "--width", "16", "--layers", "1")
table["compression"] = budgets.Budget(small, 90.0, (), torchft=False)
sys.exit(__main__.main(["all", "--only", "convergence", "compression", "--out", sys.argv[1]]))
"""


def test_a_bench_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1, done.stderr
    assert "scripts/bench: convergence: " in done.stderr
    failure = json.loads((tmp_path / "convergence.failed.json").read_text())
    assert failure["command"] == "scripts/bench convergence --no-such-option"
    assert "--no-such-option" in failure["reason"]
    about = json.loads((tmp_path / "compression.json").read_text())["about"]
    assert about["command"] == "scripts/bench compression --rounds 1 --sizes 2 --width 16 --layers 1"
    assert about["seconds"] > 0
    assert not (tmp_path / "compression.failed.json").exists()


ENDED = """
import sys
from benchmarks import __main__, budgets, supervised
supervised.INTERRUPT_S = 1.0
budgets.BUDGETS["compression"] = budgets.Budget(("--rounds", "1000000", "--sizes", "2"), 600.0, (), torchft=False)
sys.exit(__main__.main(["all", "--only", "compression", "--out", sys.argv[1]]))
"""


def test_all_that_is_told_to_end_takes_its_bench_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDED, str(tmp_path)]
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}  # a bench that is ended leaves its logs
    every = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: len(_descendants(every.pid)) == 3, 60.0)  # the bench and its two workers
        began = _descendants(every.pid)
        every.send_signal(signal.SIGTERM)
        assert every.wait(60.0) == 128 + signal.SIGTERM
    finally:
        every.kill()
        every.wait()
    assert not any(Path(f"/proc/{pid}").exists() for pid in began)


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _descendants(pid: int) -> set[int]:
    children = supervised.children_of(pid)
    return children.union(*map(_descendants, children))


@pytest.mark.parametrize(
    ("log", "status", "reason"),
    [
        (
            "a table\nscripts/bench: two differ\nscripts/bench: three, too\n/out/x.md\n",
            1,
            "two differ; three, too",
        ),
        ("Traceback ...\nKeyError: 'x'\n\n", 1, "KeyError: 'x'"),
        ("", 3, "exit status 3"),
        ("half a tab", -9, "ended by signal 9"),
    ],
)
def test_the_reason_of_a_failure_is_what_the_bench_says(
    tmp_path: Path, log: str, status: int, reason: str
) -> None:
    (tmp_path / "log").write_text(log)
    assert run_all.reason_in(tmp_path / "log", status) == reason


def test_figures_take_an_older_failure_away(tmp_path: Path) -> None:
    report.write_failure(tmp_path, "windows", "scripts/bench windows", "it broke")
    report.write(tmp_path, "windows", ABOUT, {"systems": []}, [], [])
    assert not report.failure_file(tmp_path, "windows").exists()


def test_what_a_run_was_made_with_is_recorded_once() -> None:
    arguments = ["recovery", "--kills", "3", "--out", "/somewhere/else", "--torchft-python=/a/python"]
    about = About(arguments, 7, None).finished()
    assert about["command"] == "scripts/bench recovery --kills 3"
    assert about["seed"] == 7
    assert {"time", "seconds", "cpu", "cores", "memory_gib", "kernel", "python", "torch", "commit"} <= set(
        about
    )
    assert about["others_used_cores"] >= 0
    assert "torchft" not in about
    assert command_line(["state", "--parts", "steps"]) == "scripts/bench state --parts steps"


# --- the page ----------------------------------------------------------------------------------------------------------


def _kill(stall_s: float | None, died: int = 0, lost: int = 0) -> dict[str, Any]:
    return {
        "victim": "replica_1",
        "normal_step_s": 0.04,
        "stall_s": stall_s,
        "survivors_died": died,
        "steps_lost": lost,
        "restart_to_commit_s": 3.0,
        "rejoin_stall_s": 0.01,
    }


def _variant(name: str, kills: list[dict[str, Any]], ended: str = "") -> dict[str, Any]:
    return {
        "variant": name,
        "title": name,
        "kills": kills,
        "ended_early": ended,
        "steps_compared": 5,
        "steps_that_differ": 0,
        "jobs_lost": 0,
    }


RECOVERY = {
    "variants": [
        _variant("plus", [_kill(0.1), _kill(0.2), _kill(0.3)]),
        _variant(
            "torchft",
            [_kill(5.0, lost=1), _kill(None, died=2)],
            "it ended, see /scratch/bench-x/replica_0.log",
        ),
        _variant("torchft-tuned", [_kill(None, died=2)]),
    ]
}
WINDOWS = {
    "systems": [
        {"system": "torchft_plus", "kills": [{"lost": 0, "stall_s": 0.1, "died": False}]},
        {"system": "torchft", "kills": [{"lost": 20, "stall_s": 4.0, "died": False}]},
    ]
}


def _load(system: str, groups: int, round_ms: list[float]) -> dict[str, Any]:
    keys = (
        "connect_ms",
        "connect_cpu_s",
        "rest_share",
        "rest_client_share",
        "round_cpu_s",
        "round_client_cpu_s",
    )
    series: dict[str, list[float]] = {key: [] for key in ("reported_ms", "broken_ms", "join_ms")}
    zeros = dict.fromkeys(keys, 0.0)
    return {
        "system": system,
        "groups": groups,
        "round_ms": round_ms,
        "other_load_cores": 0.0,
        **zeros,
        **series,
    }


LIGHTHOUSE = {
    "loads": [
        _load("torchft_plus", 128, [20.0, 30.0]),
        _load("torchft", 128, [10.0, 10.0]),
        _load("torchft_plus", 1024, [99.0]),
        _load("torchft_plus", 4096, []),
    ],
    "steps": None,
    "rest_s": 1.0,
}


def _transfer(mode: str, gb_s: float, extra: float) -> dict[str, Any]:
    spread = dict.fromkeys(("gb_s", "gb_s_p10", "gb_s_p90", "gb_s_low", "gb_s_high"), gb_s)
    counts = {
        "runs": 3,
        "cpu_s_gb": 0.5,
        "donor_extra": 0.0,
        "receiver_extra": extra,
        "other_load_cores": 0.0,
    }
    return {"size_mb": 64, "mode": mode, **spread, **counts}


STATE = {
    "transfer": [_transfer("ours", 3.0, 0.0), _transfer("http", 1.0, 1.0), _transfer("pg", 4.0, 0.0)],
    "steps": [
        state_steps._entry(
            state_steps.Variant("torchft_plus", throttled=True, compute="device"),
            [
                {
                    **dict.fromkeys(("normal_s", "three_s"), [0.04] * 30),
                    "during_s": [0.05] * 30 + [0.4],
                    "join_s": 1.0,
                    "steps_that_differ": 0,
                }
            ],
        )
    ],
}


def _goodput_row(name: str, tokens_per_s: float, timeline: list[list[int]]) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("kills", "kills_skipped", "steps_lost", "restarts", "own_deaths", "total_losses"), 0
    )
    return {
        "name": name,
        "ended_early": "",
        "undisturbed_tokens_per_s": 100.0,
        "tokens_per_s": tokens_per_s,
        "share_raw": tokens_per_s / 100,
        "share_corrected": tokens_per_s / 80,
        "share_corrected_restart": tokens_per_s / 90,
        "absences": [],
        "deaths": [],
        "digests_differ": 0,
        "digests_compared": 3,
        "own_cores": [0.5, 0.9],
        "others_cores": [0.1, 0.2],
        "timeline": timeline,
        **counts,
    }


def _outcome(system: str, share: float, ended_s: float | None, error: str = "") -> dict[str, Any]:
    return {
        "scenario": "lighthouse",
        "system": system,
        "normal_steps_per_s": 5.0,
        "window_s": 30.0,
        "steps": 9,
        "share": share,
        "longest_gap_s": 0.3,
        "steps_lost": 0,
        "survivors_died": 0,
        "went_on": ended_s is None,
        "ended_s": ended_s,
        "victim_back_s": None,
        "digests_differ": 0,
        "error": error,
    }


GOODPUT = {
    "settings": {"groups": 3, "seconds": 40.0, "kill_every_s": 20.0, "state_bytes": 1000},
    "goodput": {
        "rows": [
            _goodput_row("torchft_plus", 72.0, [[0, 10], [1, 20]]),
            _goodput_row("torchft tuned", 20.0, [[0, 5], [1, 5]]),
            _goodput_row("torchft tuned, allreduce", 40.0, [[0, 9], [1, 9]]),
            {"name": "torchft default", "ended_early": "it does not train, see /scratch/x/y.log"},
            _goodput_row("checkpoint-restart", 50.0, []),
        ]
    },
    "scenarios": [
        _outcome("torchft_plus", 1.0, None),
        _outcome("torchft default", 0.0, 60.1),
        _outcome("torchft tuned", 0.0, None, error="it did not start"),
    ],
}


def _make(folder: Path, **results: dict[str, Any]) -> tuple[str, list[str]]:
    """The page of these results, and what was said to be wrong."""
    for name, result in results.items():
        report.write(folder, name, ABOUT, result, [], ["a note"])
    failed = page.write(folder, folder / "docs")
    text = (folder / "docs" / page.PAGE).read_text()
    return text, failed


def _row(text: str, what: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_summary_is_computed_and_says_what_is_missing(tmp_path: Path) -> None:
    text, failed = _make(tmp_path, recovery=RECOVERY, windows=WINDOWS, lighthouse=LIGHTHOUSE, state=STATE)
    assert failed == []
    gap = _row(text, "gap of the survivors after a kill, s")
    assert gap[:3] == ["0.200 [0.100..0.300]", "5.00", "no survivor"]
    assert gap[4] == "25.0 x [16.7..50.0]"
    assert _row(text, "the same if no launcher reports the exit, s")[0] == "not measured"
    assert _row(text, "kills that took survivors with them")[:3] == ["0 of 3", "1 of 2", "1 of 1"]
    assert _row(text, "steps lost by survivors per kill")[:3] == ["0", "1", "no survivor"]
    assert _row(text, "inner steps lost by a death in a DiLoCo sync")[:2] == ["0", "20"]
    assert _row(text, "gap of the survivor then, s")[4] == "40.0 x"
    # where torchft is ahead the row looks the same
    assert _row(text, "Lighthouse, a round of 128 groups, ms")[4] == "0.400 x [0.333..0.500]"
    assert _row(text, "Lighthouse, a round of 1024 groups, ms")[:2] == ["99.0", "not measured"]
    assert _row(text, "state of 64 MB to a joiner, GB/s")[4] == "0.750 x"
    joining = "while a joiner fetches, a slow link, compute: device, of the normal"
    assert _row(text, f"survivors' p95 step {joining} p95")[:2] == ["1.25", "not measured"]
    assert _row(text, f"survivors' worst step {joining} median")[0] == "10.0"
    assert _row(text, "step with nobody failing, of plain DDP's")[0] == "not measured"


def test_the_page_has_every_bench_its_origin_and_its_failures(tmp_path: Path) -> None:
    report.write_failure(
        tmp_path, "overhead", "scripts/bench overhead", "no answer, see /scratch/bench-overhead/x.log"
    )
    text, _ = _make(tmp_path, recovery=RECOVERY, state=STATE)
    for name in BENCHES:
        assert f"\n## {name}\n" in text
    section = text.split("## recovery")[1].split("\n## ")[0]
    assert "    scripts/bench x\n" in section
    assert "Measured 2026-01-02 03:04:05 UTC, a CPU, 2 cores, torch 2.13." in section
    assert "**Failed:** torchft: it ended, see replica_0.log" in section
    assert "- a note" in section
    overhead = text.split("## overhead")[1].split("\n## ")[0]
    assert "gave no figures** (`scripts/bench overhead`): no answer, see x.log" in overhead
    assert "not measured" in text.split("## windows")[1]
    assert "/scratch/" not in text


def test_goodput_in_the_summary_takes_each_system_at_its_best(tmp_path: Path) -> None:
    text, failed = _make(tmp_path, goodput=GOODPUT)
    assert failed == []
    tokens = _row(text, "goodput under kills, committed tokens/s")
    assert tokens[:5] == ["72.0", "failed, see below", "40.0", "50.0", "1.80 x"]
    corrected = _row(text, "the same, corrected for absent groups")
    assert corrected[:4] == ["0.900", "failed, see below", "0.500", "0.625"]
    (fault,) = [
        line for line in text.splitlines() if line.startswith("| Lighthouse killed, back after 10 s: ")
    ]
    assert "| 1.00 | 0, all ended after 60.1 s | failed, see below | - | - |" in fault
    assert "/scratch/" not in text
    assert "**Failed:** torchft default: it does not train, see y.log" in text
    assert "not measured" in next(line for line in text.splitlines() if line.startswith("| a group frozen"))


def test_odd_figures_are_shown_without_ratios(tmp_path: Path) -> None:
    odd = {
        "variants": [_variant("plus", [_kill(math.nan), _kill(0.0)]), _variant("torchft", [_kill(math.inf)])]
    }
    text, failed = _make(tmp_path, recovery=odd)
    assert failed == []
    assert _row(text, "gap of the survivors after a kill, s")[:5] == [
        "0",
        "not measured",
        "not measured",
        "-",
        "-",
    ]


def test_figures_of_another_version_are_told_and_leave_the_rest(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{half")
    text, failed = _make(tmp_path, windows={"systems": [{"system": "torchft"}]}, lighthouse=LIGHTHOUSE)
    assert len(failed) == 2
    assert "state.json cannot be read" in failed[0]
    assert "the figures of windows are not what this version of it writes" in failed[1]
    assert "not measured: the figures of windows" in text
    assert _row(text, "gap of the survivor then, s")[0] == "not measured"
    assert _row(text, "Lighthouse, a round of 128 groups, ms")[0] == "25.0 [20.0..30.0]"


def test_nothing_measured_makes_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--out", str(tmp_path), "--docs", str(tmp_path / "docs")]) == 1
    assert "has no figures of any bench" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_pictures_are_small_and_of_these_figures_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text, failed = _make(tmp_path, recovery=RECOVERY, lighthouse=LIGHTHOUSE, state=STATE, goodput=GOODPUT)
    assert failed == []
    pictures = tmp_path / "docs" / page.PICTURES
    assert {path.name for path in pictures.iterdir()} == {
        *("recovery.png", "lighthouse.png", "state.png", "goodput.png")
    }
    assert all(0 < path.stat().st_size < 80_000 for path in pictures.iterdir())
    assert all(f"]({page.PICTURES}/{path.name})" in text for path in pictures.iterdir())
    (tmp_path / "state.json").unlink()
    text, _ = _make(tmp_path, recovery=RECOVERY)
    assert not (pictures / "state.png").exists()
    assert "state.png" not in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.0, "1.00"),
        (99.95, "100.0"),
        (1234.5, "1234"),
        (math.nan, "-"),
        (-2.5, "-2.50"),
    ],
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert summary.digits(value) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see /scratch/bench-1/a.log", "see a.log"),
        ("0.9 GB/s, 1/2 of http://it/is/so", "0.9 GB/s, 1/2 of http://it/is/so"),
        ("docs/x/y.md and (/a/b/c)", "docs/x/y.md and (c)"),
    ],
)
def test_places_of_the_machine_are_not_published(text: str, shown: str) -> None:
    assert page.without_places(text) == shown


# --- links -------------------------------------------------------------------------------------------------------------


def _anchors(path: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_of_the_docs_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in _anchors(found), f"{path.name} links to {target}"


def test_the_page_of_any_figures_has_whole_links(tmp_path: Path) -> None:
    text, _ = _make(tmp_path, recovery=RECOVERY, windows=WINDOWS)
    anchors = _anchors(tmp_path / "docs" / page.PAGE)
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert anchor in anchors
