"""The training part of a run file: what is refused, what is passed on. No torch, no torchtitan."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan import versions
from torchft_plus.titan.__main__ import main
from torchft_plus.titan.config import TitanConfig, own_folder, read
from torchft_plus.titan.schema import check_tables, override

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("llama3_*.toml"))
LIGHTHOUSE = {"TORCHFT_LIGHTHOUSE": "http://lighthouse:29510/"}


def run(tmp_path: Path, text: str, *arguments: str, **environment: str) -> TitanConfig:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return read(["--job.config_file", str(file), *arguments], environment)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("[trainning]", "[trainning] is not a known table; did you mean [training]?"),
        (
            "[training]\nseq_length = 8",
            "training.seq_length is not a known key; did you mean training.seq_len?",
        ),
        ("[training]\nsteps = '9'", "training.steps is '9' (a string), expected a whole number."),
        ("[training]\ngc_debug = 1", "training.gc_debug is 1 (a whole number), expected true or false."),
        (
            "[training]\ndtype = 'int8'",
            'training.dtype is \'int8\' (a string), expected one of "bfloat16", "float32".',
        ),
        (
            "[training.dataloader]\nworkers = 1",
            "training.dataloader.workers is not a known key; did you mean",
        ),
        ("[[training]]\nsteps = 1", "training is a single value or a list of tables, expected a table"),
        ("[model]\nconverters = [1]", "model.converters is [1] (a list), expected a list of strings."),
    ],
)
def test_mistakes_get_one_sentence(document: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tables(tomllib.loads(document), open_ended=False)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_tables_of_a_custom_config_module_are_left_alone() -> None:
    document = tomllib.loads("[own]\nanything = 1")
    assert check_tables(document, open_ended=True) == {"own": {"anything": 1}}
    with pytest.raises(ConfigError):
        check_tables(document, open_ended=False)


def test_overrides_are_read_by_the_type_of_their_key() -> None:
    document, rest = override(
        {"training": {"steps": 5}},
        [
            ("training", "steps", "7"),
            ("training", "dataloader.num_workers", "2"),
            ("checkpoint", "enable", None),
            ("checkpoint", "no_last_save_model_only", None),
            ("compile", "components", "model,loss"),
            ("model", "flavor", "8B"),
            ("dataloader", "infinite", None),
            ("override", "imports", "a.b"),
        ],
    )
    assert document["training"] == {"steps": 7, "dataloader": {"num_workers": 2}}
    assert document["checkpoint"] == {"enable": True, "last_save_model_only": False}
    assert document["compile"]["components"] == ["model", "loss"]
    assert document["model"]["flavor"] == "8B"
    assert rest == ["--dataloader.infinite", "--override.imports", "a.b"]


def test_own_tables_stay_out_of_what_torchtitan_is_given(tmp_path: Path) -> None:
    text = "[training]\nsteps = 30\n[launch]\nreplicas = 3\n[fault_tolerance]\nenable = true\n[lighthouse]\n"
    text += '[[chaos]]\nat_step = 2\nkill = "replica_1"\n'
    config = run(tmp_path, text, "--fault_tolerance.timeout_ms", "9000", REPLICA_ID="replica_2", **LIGHTHOUSE)
    assert config.tables.keys() == {"training", "job", "checkpoint"}
    assert config.tables["training"] == {"steps": 30}
    assert config.native == ()
    assert (config.replica_name, config.replica_index, config.group_size) == ("replica_2", 2, 3)
    assert config.fault_tolerance.timeout_ms == 9000
    assert config.lighthouse == "lighthouse:29510"


def test_each_group_has_its_own_folder_and_all_share_the_checkpoints(tmp_path: Path) -> None:
    text = f"[job]\ndump_folder = '{tmp_path}/out'\n[fault_tolerance]\nenable = true\ngroup_size = "
    tables = run(tmp_path, text + "2", REPLICA_ID="replica_1", **LIGHTHOUSE).tables
    assert tables["job"]["dump_folder"] == f"{tmp_path}/out/replica_1"
    assert tables["checkpoint"]["folder"] == f"{tmp_path}/out/checkpoint"
    assert run(tmp_path, text + "1", **LIGHTHOUSE).tables == {"job": {"dump_folder": f"{tmp_path}/out"}}


def test_a_folder_elsewhere_is_left_alone() -> None:
    tables = {"job": {"dump_folder": "gs://bucket/out"}}
    assert own_folder(tables, "replica_1") == tables
    tables = {"checkpoint": {"folder": "gs://bucket/checkpoint"}}
    assert own_folder(tables, "replica_1")["checkpoint"] == tables["checkpoint"]


def test_replica_id_comes_from_override_then_launcher_then_file(tmp_path: Path) -> None:
    text = "[fault_tolerance]\nenable = true\ngroup_size = 4\nreplica_id = 1\n"
    assert run(tmp_path, text, **LIGHTHOUSE).replica_name == "replica_1"
    assert run(tmp_path, text, REPLICA_ID="3", **LIGHTHOUSE).replica_name == "replica_3"
    override_ = ("--fault_tolerance.replica_id", "2")
    assert run(tmp_path, text, *override_, REPLICA_ID="3", **LIGHTHOUSE).replica_index == 2


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        ("enable = true", {}, "No Lighthouse is named"),
        ("enable = true", {"TORCHFT_LIGHTHOUSE": "nowhere"}, "expected host:port"),
        ("enable = true\ngroup_size = 2", {**LIGHTHOUSE, "REPLICA_ID": "replica_2"}, "numbers 0 to 1 only"),
        ("enable = true\ngroup_size = 2", {**LIGHTHOUSE, "REPLICA_ID": "north"}, "does not end in a number"),
        (
            "enable = true\nsemi_sync_method = 'diloco'\nsync_steps = 20\n[training]\nsteps = 50",
            LIGHTHOUSE,
            "training.steps is 50: with fault_tolerance.semi_sync_method it must be a multiple of the 20 steps",
        ),
        (
            "enable = true\nsemi_sync_method = 'diloco'\nsync_steps = 20\nnum_fragments = 2\n[parallelism]\n"
            "pipeline_parallel_degree = 2",
            LIGHTHOUSE,
            "pipeline_parallel_degree",
        ),
        ("enable = true\ngroup_size = 2\nmin_replica_size = 3", LIGHTHOUSE, "min_replica_size"),
        ("enable = true\n[optimizer]\nearly_step_in_backward = true", LIGHTHOUSE, "early_step_in_backward"),
        (
            "enable = true\n[quantize.linear.float8]\nprecompute_float8_dynamic_scale_for_fsdp = true",
            LIGHTHOUSE,
            "float8",
        ),
        ("enable = true\n[comm]\nmode = 'fake_backend'", LIGHTHOUSE, "comm.mode"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, text: str, environment: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        run(tmp_path, "[fault_tolerance]\n" + text, **environment)


@pytest.mark.parametrize(
    ("torchtitan", "torch", "part"),
    [
        (None, "2.13.0", "torchtitan is not installed"),
        ("0.2.1", "2.13.0", "torchtitan 0.2.1 is not supported"),
        ("0.4.0", "2.13.0", "torchtitan 0.4.0 is not supported"),
        ("0.0.0+unknown", "2.13.0", "torchtitan 0.0.0"),
        ("0.3.0", "2.12.1+cpu", "torch 2.12.1"),
        ("0.3.0", None, "torch is not installed"),
    ],
)
def test_other_versions_are_refused(torchtitan: str | None, torch: str | None, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        versions.check(torchtitan, torch)


@pytest.mark.parametrize("torchtitan", ["0.2.2", "0.2.3", "0.3.0", "0.3.1.dev2026"])
def test_supported_versions(torchtitan: str) -> None:
    assert versions.check(torchtitan, "2.13.0+cpu") in ((0, 2), (0, 3))


@pytest.mark.parametrize("problem", ["version", "file", "key", "environment"])
def test_a_mistake_starts_nothing(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nstepps = 3\n" if problem == "key" else "[training]\nsteps = 3\n")
    installed = {"torchtitan": "0.4.0" if problem == "version" else "0.3.0", "torch": "2.13.0"}
    monkeypatch.setattr(versions, "installed", installed.get)
    monkeypatch.delenv("RANK", raising=False)
    before = set(sys.modules)
    path = str(tmp_path / "missing.toml") if problem == "file" else str(file)
    assert main(["--job.config_file", path]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("torchft_plus.titan: ")
    assert not [name for name in set(sys.modules) - before if name.startswith("torchtitan")]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_run_files_are_sound(file: Path) -> None:
    config = read(["--job.config_file", str(file)], LIGHTHOUSE)
    assert config.fault_tolerance.enable
    assert config.group_size == {
        "llama3_debug_cpu": 3,
        "llama3_debug_cpu_fsdp": 2,
        "llama3_debug_cpu_diloco": 4,
    }.get(file.stem, 16)
    assert config.fault_tolerance.process_group == {"mi300": "rccl", "h100": "nccl"}.get(
        file.stem.removesuffix("_diloco").rsplit("_", 1)[-1], "gloo"
    )
