import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.config import (
    Chaos,
    ConfigError,
    FaultTolerance,
    Launch,
    LighthouseTable,
    RunFile,
    load_table,
)

DILOCO = "semi_sync_method = 'diloco'\nsync_steps = 20\n"
GOOD = """
[training]
steps = 40
[fault_tolerance]
enable = true
[launch]
replicas = 3
ranks_per_replica = 2
[[chaos]]
at_step = 12
kill = "replica_1.1"
"""


def load(tmp_path: Path, text: str, *arguments: str) -> RunFile:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return RunFile.load(path, arguments)


def refusal(tmp_path: Path, text: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", "?"))
    return sentence


def test_a_good_file(tmp_path: Path) -> None:
    run = load(tmp_path, GOOD)
    assert run.steps == 40
    assert run.replica_ids == ("replica_0", "replica_1", "replica_2")
    assert run.fault_tolerance.group_size == 3  # follows from [launch]
    assert run.chaos == (Chaos(at_step=12, kill="replica_1.1"),)
    assert run.training == {"training": {"steps": 40}}
    assert run.fault_tolerance.timeouts.heartbeat_timeout_ms == 5_000


def test_without_launch_the_trainer_reads_only_its_own_tables(tmp_path: Path) -> None:
    run = load(tmp_path, "[fault_tolerance]\nenable = true\nreplica_id = 2\ngroup_size = 3")
    assert run.fault_tolerance.replica_name == "replica_2"
    assert run.fault_tolerance.group_size == 3


@pytest.mark.parametrize(
    ("table", "line", "names"),
    [
        (
            "fault_tolerance",
            "min_replica = 1",
            ("fault_tolerance.min_replica ", "fault_tolerance.min_replica_size"),
        ),
        ("fault_tolerance", "timeout_ms = '60s'", ("fault_tolerance.timeout_ms", "'60s'", "whole number")),
        ("fault_tolerance", "timeout_ms = true", ("fault_tolerance.timeout_ms", "true", "whole number")),
        ("fault_tolerance", "process_group = 'mpi'", ("fault_tolerance.process_group", '"gloo"', '"rccl"')),
        ("fault_tolerance", "group_size = 4", ("fault_tolerance.group_size is 4", "launch.replicas is 3")),
        ("fault_tolerance", "min_replica_size = 4", ("fault_tolerance.min_replica_size (4)", "(3)")),
        ("fault_tolerance", "min_replica_size = 0", ("fault_tolerance.min_replica_size", "at least 1")),
        ("fault_tolerance", "timeout_ms = 10", ("fault_tolerance.timeout_ms is 10", "1000")),
        ("fault_tolerance", "outage_limit_ms = 5000", ("fault_tolerance.outage_limit_ms", "timeout_ms")),
        (
            "fault_tolerance",
            "process_group_timeout_ms = 90000",
            ("process_group_timeout_ms (90000)", "60000"),
        ),
        ("fault_tolerance", "group_size = 3\nreplica_id = 3", ("replica_id is 3", "0 to 2")),
        ("fault_tolerance", "replica_id = 7", ("replica_id is 7", "0 to 2")),
        ("fault_tolerance", "group_size = 3\nreplica_id = -1", ("replica_id is -1", "at least 0")),
        ("fault_tolerance", "replica_id = 'a.b'", ("replica_id", "a.b")),
        ("fault_tolerance", "lighthouse = 'somewhere'", ("fault_tolerance.lighthouse", "host:port")),
        ("fault_tolerance", "semi_sync_method = 'dilco'", ("semi_sync_method", '"diloco"', '"local_sgd"')),
        ("fault_tolerance", "sync_steps = 20", ("fault_tolerance.sync_steps", "semi_sync_method is not set")),
        ("fault_tolerance", f"{DILOCO}weighting = 'tokens'", ("weighting", "semi_sync_method")),
        ("fault_tolerance", "semi_sync_method = 'local_sgd'\nouter_lr = 0.5", ("outer_lr", "local_sgd")),
        ("fault_tolerance", f"{DILOCO}num_fragments = 3", ("sync_steps is 20", "fragments (3)")),
        (
            "fault_tolerance",
            f"{DILOCO}fragment_sync_delay = 20",
            ("fragment_sync_delay is 20", "below the 20"),
        ),
        (
            "fault_tolerance",
            f"{DILOCO}fragment_update_alpha = 1.5",
            ("fragment_update_alpha is 1.5", "at most 1"),
        ),
        ("fault_tolerance", f"{DILOCO}error_feedback = true", ("error_feedback", "set codec")),
        ("fault_tolerance", f"{DILOCO}should_quantize = true\ncodec = 'bf16'", ("should_quantize", '"bf16"')),
        ("fault_tolerance", f"{DILOCO}outer_momentum = 0", ("outer_momentum", "outer_nesterov")),
        (
            "fault_tolerance",
            f"{DILOCO}module_fqns_per_model_fragment = ['a']",
            ("module_fqns", "list of lists"),
        ),
        (
            "fault_tolerance",
            f"{DILOCO}num_fragments = 4\nmodule_fqns_per_model_fragment = [['a'], ['b']]",
            ("num_fragments is 4", "lists 2"),
        ),
        ("launch", "command = 'python x.py'", ("launch.command", "list of strings")),
        ("launch", "env = {A = 1}", ("launch.env", "table of strings")),
        ("launch", "restart_delay_ms = 60000", ("restart_delay_max_ms", "60000")),
        ("launch", "command = ['x']\nwarm_spares = 1", ("launch.warm_spares", "launch.module")),
        ("launch", "stop_grace_s = 0", ("launch.stop_grace_s", "more than 0")),
        ("lighthouse", "min_replicas = 9", ("lighthouse.min_replicas (9)", "(3)")),
    ],
)
def test_one_sentence_for_each_mistake(tmp_path: Path, table: str, line: str, names: tuple[str, ...]) -> None:
    text = GOOD if f"[{table}]" in GOOD else GOOD.replace("[[chaos]]", f"[{table}]\n[[chaos]]")
    sentence = refusal(tmp_path, text.replace(f"[{table}]", f"[{table}]\n{line}"))
    for name in names:
        assert name in sentence


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ('at_step = 5\nkill = "replica_3"', ("chaos[0].kill", "replica_3", "replica_2")),
        ('at_step = 5\nkill = "replica_1.2"', ("replica_1.2", "ranks 0 to 1")),
        ('at_step = 5\nkill = "replica_1."', ("chaos[0].kill",)),
        ('at_step = 40\nkill = "replica_1"', ("chaos[0].at_step is 40", "training.steps = 40")),
        ('at_step = 5\nkill = "replica_1"\nstop = "replica_0"', ("kill and stop",)),
        ("at_step = 5", ("none",)),
        ('kill = "replica_1"', ("at_step, at_event, every_s", "none")),
        ('at_step = 5\nevery_s = 1.0\nkill = "random"', ("at_step and every_s",)),
        ('at_event = "fetched"\nkill = "random"', ("random",)),
        ('at_step = 5\nkill = "lighthouse"\nresume_after_s = 3', ("resume_after_s",)),
        ('at_step = 5\nkill = "lighthouse"\ntimes = 3', ("times",)),
        ('at_setp = 5\nkill = "lighthouse"', ("chaos[0].at_setp", "did you mean chaos[0].at_step?")),
    ],
)
def test_chaos_entries_are_checked(tmp_path: Path, entry: str, names: tuple[str, ...]) -> None:
    sentence = refusal(tmp_path, GOOD.split("[[chaos]]")[0] + "[[chaos]]\n" + entry)
    for name in names:
        assert name in sentence


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[fault_tolerence]\nenable = true", ("[fault_tolerence]", "[fault_tolerance]")),
        ("enable = true", ("enable", "[section]")),
        ("[launch]\nreplicas = 2", ("fault_tolerance.enable",)),
        ("[[chaos]]\nat_step = 1\nkill = 'lighthouse'", ("[launch]",)),
        ("[chaos]\nat_step = 1", ("[[chaos]]",)),
        ("launch = 3", ("launch",)),
        ("[launch", ("not valid TOML",)),
        (
            "[fault_tolerance]\nenable = true\nlighthouse = 'h:1'\n[launch]\n[lighthouse]\nmin_replicas = 1",
            ("fault_tolerance.lighthouse", "[lighthouse]"),
        ),
        (
            "[fault_tolerance]\nenable = true\nlighthouse = 'h:1'\n[launch]\n"
            "[[chaos]]\nat_step = 1\nkill = 'lighthouse'",
            ("chaos[0].kill", "lighthouse"),
        ),
    ],
)
def test_the_file_as_a_whole_is_checked(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    sentence = refusal(tmp_path, text)
    for name in names:
        assert name in sentence


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFile.load(tmp_path / "none.toml")


def test_overrides_go_before_the_file_and_pass_through_to_the_trainer(tmp_path: Path) -> None:
    arguments = ["--launch.replicas", "2", "--fault_tolerance.timeout-ms=12000", "--training.steps", "50"]
    arguments.append("--metrics.enable_x")
    run = load(
        tmp_path, GOOD, *arguments, "--launch.env.OMP_NUM_THREADS", "2", "--fault_tolerance.job_id", "7"
    )
    assert (run.launch.replicas, run.fault_tolerance.timeout_ms, run.steps) == (2, 12_000, 50)
    assert run.launch.env == {"OMP_NUM_THREADS": "2"}
    assert run.fault_tolerance.job_id == "7"
    assert run.trainer_arguments == (
        *(
            "--launch.replicas",
            "2",
            "--fault_tolerance.timeout_ms",
            "12000",
            "--training.steps",
            "50",
            "--metrics.enable_x",
        ),
        *("--launch.env.OMP_NUM_THREADS", "2", "--fault_tolerance.job_id", "7"),
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--launch.replica", "2"], "did you mean launch.replicas?"),
        (["--launch.replicas", "two"], "launch.replicas is 'two'"),
        (["--launch.replicas"], "needs a value"),
        (["--chaos.at_step", "2"], "[[chaos]]"),
        (["stray"], "'stray'"),
    ],
)
def test_bad_overrides(tmp_path: Path, arguments: list[str], name: str) -> None:
    assert name in refusal(tmp_path, GOOD, *arguments)


VALUES = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.lists(st.text()))


@given(cls=st.sampled_from([FaultTolerance, Launch, LighthouseTable, Chaos]), data=st.data())
def test_any_value_is_taken_as_it_is_or_refused_by_name(cls: type[Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([f.name for f in fields(cls)]))
    value = data.draw(VALUES)
    try:
        loaded = getattr(load_table(cls, {key: value}, "table"), key)
    except ConfigError as error:
        assert str(error).startswith(f"table.{key} is ")
    else:
        assert loaded == (tuple(value) if isinstance(value, list) else value)
        assert isinstance(loaded, bool) == isinstance(value, bool)


@given(st.dictionaries(st.text(min_size=1), VALUES, min_size=1))
def test_unknown_keys_never_pass(table: dict[str, Any]) -> None:
    known = {f.name for f in fields(Launch)}
    if not set(table) <= known:
        with pytest.raises(ConfigError):
            load_table(Launch, table, "launch")


@pytest.mark.parametrize(
    ("cls", "section"),
    [
        (FaultTolerance, "[fault_tolerance]"),
        (Launch, "[launch]"),
        (LighthouseTable, "[lighthouse]"),
        (Chaos, "[[chaos]]"),
    ],
)
def test_every_key_is_documented_and_nothing_else(cls: type[Any], section: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    part = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|(?: `([^`]*)` \|)?", part, re.MULTILINE)
    assert {key for key, _ in documented} == {f.name for f in fields(cls)}
    defaults = {f.name: f.default for f in fields(cls)}
    for key, default in documented:
        if default and default not in ("timeout_ms", "launch.replicas", "min_replica_size"):
            assert tomllib.loads(f"value = {default}")["value"] == defaults[key], key
