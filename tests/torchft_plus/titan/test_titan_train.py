"""Whole runs of the installed torchtitan, each in processes of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torchtitan") is None:  # importing it needs our preparations
    pytest.skip("needs torchtitan", allow_module_level=True)

from titan_runs import ROOT, Runs

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan import versions
from torchft_plus.titan.adapters import load_adapter
from torchft_plus.titan.config import read

pytestmark = [pytest.mark.titan, pytest.mark.timeout(400)]

CONFIGS = sorted((ROOT / "configs").glob("llama3_*.toml"))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()


def test_one_replica_alone_equals_the_stock_trainer_bit_for_bit(runs: Runs) -> None:
    """Also one whose attempts are refused now and then: a refused step leaves no trace. Two micro-batches a step."""
    two = ("--training.global_batch_size", "2")
    runs.start_lighthouse(expected=1)
    first = [
        runs.start("stock", 5, *two, "--fault_tolerance.enable=false"),
        runs.start("alone", 5, *two, "--metrics.enable_tensorboard"),
    ]
    assert [process.wait(120) for process in first] == [0, 0], runs.tails()
    spoilt = ("--fault_tolerance.job_id", "spoilt")
    second = [
        runs.start("refused", 5, *two, TITAN_REFUSE="1,3,4,7"),
        runs.start("infinite", 6, *two, *spoilt, TITAN_INFINITE="4", REPLICA_ID="0"),
    ]
    assert [process.wait(120) for process in second] == [0, 0], runs.tails()
    stock, alone, refused, infinite = map(runs.result, ("stock", "alone", "refused", "infinite"))
    assert [stock.pop("plugin"), alone.pop("plugin"), refused.pop("plugin")] == [False, True, True]
    assert (stock["step"], stock["tokens"]) == (5, 320)
    assert alone == stock
    assert refused == stock
    commits = [event["step"] for event in runs.events("replica_0", "commit")]
    assert commits.count(5) == 2  # alone, infinite
    # A step that is not finite is counted, and its batches are gone, but nothing is applied, nobody ends.
    assert [event["step"] for event in runs.events("replica_0", "skip")] == [2]
    assert (infinite["step"], infinite["tokens"]) == (6, 384)
    assert infinite["parameters"] != stock["parameters"]
    tags = runs.metrics()
    assert {tag for tag in tags if tag.startswith("ft/")} == {
        "ft/participants",
        "ft/quorum_id",
        "ft/commits",
        "ft/refusals",
        "ft/heal_seconds",
    }
    assert tags["ft/commits"] == [1, 2, 3, 4, 5]
    assert tags["ft/participants"] == [1, 1, 1, 1, 1]


def test_a_killed_group_heals_to_the_same_bits_and_reads_on_where_it_was(runs: Runs) -> None:
    steps = 150
    runs.start_lighthouse(expected=2)
    survivor = runs.start("replica_0", steps, groups=2)
    victim = runs.start("replica_1", steps, groups=2, REPLICA_ID="replica_1")
    runs.until(lambda: len(runs.events("replica_1", "commit")) >= 5, 120, "five steps")
    victim.kill()
    victim.wait()
    killed = len(runs.events("replica_1", "commit"))
    again = runs.start("replica_1", steps, groups=2, REPLICA_ID="replica_1")
    assert [survivor.wait(200), again.wait(30)] == [0, 0], runs.tails()
    commits = runs.events("replica_0", "commit")
    assert [event["step"] for event in commits] == list(range(1, steps + 1)), "the survivor lost a step"
    assert runs.events("replica_1", "level"), "the group that came back never was level"
    one, other = runs.result("replica_0"), runs.result("replica_1")
    assert one == other
    digests: dict[tuple[int, int], set[str]] = {}
    for replica in ("replica_0", "replica_1"):
        for event in runs.events(replica, "digest"):
            digests.setdefault((event["step"], event["quorum_id"]), set()).add(event["digest"])
    assert all(len(found) == 1 for found in digests.values())
    contributed = [event for event in runs.events("replica_1", "commit") if event["contributed"]]
    assert killed < len(contributed) < steps
    # Each batch of 32 tokens was committed once by one group: the totals of both agree with what was contributed.
    assert one["tokens"] == 32 * (steps + len(contributed))


@pytest.fixture(scope="module")
def settings() -> Any:
    version = versions.check(versions.installed("torchtitan"), versions.installed("torch"))
    return load_adapter(version).settings


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_run_files_become_torchtitans_own_config(file: Path, settings: Any) -> None:
    arguments = ["--job.config_file", str(file), "--training.steps", "80"]
    config = settings(read(arguments, {"TORCHFT_LIGHTHOUSE": "lighthouse:1"}))
    large = "8b" in file.stem
    assert config.training.steps == 80
    assert config.training.seq_len == (8192 if large else 64)
    assert config.training.mixed_precision_param == ("bfloat16" if large else "float32")
    assert config.checkpoint.enable is large
    assert config.lr_scheduler.warmup_steps == (2000 if large else 5)
    name = config.model.flavor if hasattr(config, "model") else config.model_spec.flavor
    assert name == ("8B" if large else "debugmodel")


def test_torchtitans_own_arguments_and_refusals(tmp_path: Path, settings: Any) -> None:
    file = tmp_path / "run.toml"

    def load(text: str, *arguments: str) -> Any:
        file.write_text(text)
        return settings(read(["--job.config_file", str(file), *arguments], {}))

    loaded = load("[checkpoint]\nasync_mode = 'async'\n", "--checkpoint.enable", "--debug.no_deterministic")
    assert (loaded.checkpoint.async_mode, loaded.checkpoint.enable) == ("async", True)
    assert loaded.debug.deterministic is False
    with pytest.raises(SystemExit) as ended:
        load("", "--training.no_such_key", "1")
    assert ended.value.code == 2
    if hasattr(loaded, "model_spec"):
        for text, part in {
            "[model]\nflavor = '9B'": "model.flavor is '9B', expected one of debugmodel",
            "[model]\nname = 'llama9'": "model.name is 'llama9'",
            "[experimental]\ncustom_import = 'own'": "experimental.custom_import has no counterpart",
            "[checkpoint]\nkeep_latest_k = 1": "torchtitan refuses the run file",
            "[validation]\nseq_len = 4": "validation.seq_len is 4",
        }.items():
            with pytest.raises(ConfigError, match=part):
                load(text)


def test_one_group_writes_to_disk_and_all_go_on_from_it(runs: Runs) -> None:
    """Both groups end and start again: from the head on disk, with the data where it was."""
    disk = ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no_last_save_model_only"]
    replicas = ("replica_0", "replica_1")

    def start(run: str, steps: int, *arguments: str) -> list[Any]:
        every = ("--lr_scheduler.total_steps", "8", "--fault_tolerance.job_id", run, *arguments)
        return [
            runs.start(f"{replica}-{run}", steps, *every, groups=2, REPLICA_ID=replica)
            for replica in replicas
        ]

    def end(run: str, started: list[Any]) -> dict[str, Any]:
        """What both groups have come to."""
        assert [process.wait(150) for process in started] == [0, 0], runs.tails()
        one, other = (runs.result(f"{replica}-{run}") for replica in replicas)
        assert one == other
        return one

    runs.start_lighthouse(expected=2)
    first, straight = start("first", 4, *disk), start("straight", 8)
    end("first", first)
    folders = sorted(path.name for path in (runs.folder / "dump" / "checkpoint").iterdir())
    assert folders == ["step-2", "step-4"]
    writers = [replica for replica in replicas if "Saving the checkpoint" in runs.log(f"{replica}-first")]
    assert len(writers) == 1
    # Another job: in the old one the Lighthouse would let the first to arrive go on alone, and heal the other.
    resumed = end("second", start("second", 8, *disk))
    assert (resumed["step"], resumed["tokens"]) == (8, 8 * 2 * 32)
    assert end("straight", straight) == resumed, "a run without a stop comes to the same"
