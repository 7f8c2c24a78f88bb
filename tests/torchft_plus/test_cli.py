from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchft_plus.cli import main

ROOT = Path(__file__).parents[2]
GOOD = '[fault_tolerance]\nenable = true\n[launch]\nreplicas = 2\ncommand = ["python", "-c", "pass"]\n'


def test_importing_the_command_line_and_the_launcher_costs_no_torch() -> None:
    code = "import sys, torchft_plus.cli, torchft_plus.launch.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["check", "--help"]])
def test_help_is_worth_reading(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert "torchft-plus" in capsys.readouterr().out


def test_help_of_the_lighthouse(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["lighthouse", "--help"], ["status", "--help"]):
        assert main(words) == 0
        assert "--" in capsys.readouterr().out


def test_check_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    assert main(["check", str(path), "--launch.replicas", "3"]) == 0
    assert "3 groups" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        (GOOD + "replica = 2\n", [], "did you mean launch.replicas?"),
        ("[training]\nsteps = 3\n", [], "no [launch] table"),
        (GOOD, ["--launch.replicas", "none"], "launch.replicas is 'none'"),
        (GOOD, ["--replicas"], "'--replicas' is not understood"),
        (
            "[fault_tolerance]\nenable = true\n[launch]\n[trainin]\nsteps = 3\n",
            [],
            "trainin",
        ),  # torchtitan's part
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_mistakes_are_one_sentence_and_exit_2(
    command: str,
    text: str,
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main([command, str(path), *words]) == 2
    written = capsys.readouterr()
    assert sentence in written.err and written.err.count("\n") == 1 and not written.out
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_with_an_earlier_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old" / "events").mkdir(parents=True)
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    assert main(["run", str(path), "--launch.folder", str(tmp_path / "old")]) == 2
    assert "holds an earlier run" in capsys.readouterr().err


def test_lighthouse_and_status_are_those_of_the_lighthouse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["lighthouse", "--min_replicas", "few"]) == 2
    assert "min_replicas" in capsys.readouterr().err
