from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from torchft_plus.cli import main

ROOT = Path(__file__).parents[3]
SMALL = ["--replicas", "2", "--hours", "2", "--mtbf", "20m", "--seeds", "3", "--trials", "1"]


def test_the_simulation_costs_no_torch() -> None:
    code = "import sys, torchft_plus.goodput.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["simulate", *SMALL, "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith((folder / "goodput.txt").read_text())
    document = json.loads((folder / "goodput.json").read_text())
    assert set(document["policies"]) == {"ours", "torchft", "torchft-tuned", "checkpoint"}
    assert [len(rows) for rows in document["policies"].values()] == [3, 3, 3, 3]
    assert document["scenario"]["mtbf_s"] == 1_200 and document["scenario"]["lighthouse_mtbf_s"] is None
    plot = ET.fromstring((folder / "goodput.svg").read_text())
    words = [element.text for element in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ours", "torchft", "torchft-tuned", "checkpoint"} <= set(words)
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    assert (folder / "goodput.png").exists() == has_matplotlib
    assert has_matplotlib or "torchft-plus[plots]" in printed


def test_options_override_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--preset",
        "crash-every-180s",
        "--mtbf",
        "never",
        "--hours",
        "1",
        "--policy",
        "checkpoint,torchft",
    ]
    assert main(["simulate", *words, "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert "16 groups, 1 h, steps of 2 s" in out and "ours" not in out
    assert out.count("1.0000 .. 1.0000") == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mtbf", "3"], "'3' is not a time"),
        (["--mtbf", "0s"], "give more than 0"),
        (["--policy", "ours,magic"], "--policy is 'ours,magic'"),
        (["--policy", ""], "--policy is ''"),
        (["--replicas", "0"], "replicas is 0"),
        (["--replicas", "65"], "replicas is 65"),
        (["--hours", "0.001"], "a step of 5 s does not fit"),
        (["--hours", "nan"], "hours is not a number"),
        (["--hours", "inf"], "hours is inf"),
        (["--mtbf", "0.001s"], "failures are expected"),
        (["--seeds", "0"], "seeds is 0"),
        (["--silent-share", "2"], "silent_share is 2.0"),
        (["--reduce-share", "-1"], "reduce_share is -1.0"),
        (["--bandwidth-gbps", "0"], "bandwidth_gbps is 0.0"),
        (["--preset", "gpt"], "invalid choice: 'gpt'"),
        (["--step-second", "3"], "unrecognized arguments"),
        (["--out", __file__], "is not a folder"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    written = capsys.readouterr()
    assert sentence in written.err and written.err.count("\n") == 1 and not written.out


def test_help_of_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--help"])
    assert caught.value.code == 0
    assert "of the whole cluster" in capsys.readouterr().out
