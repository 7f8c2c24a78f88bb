"""The run file: one TOML document that describes a whole run.

Our tables are ``[fault_tolerance]``, ``[launch]``, ``[lighthouse]``, ``[security]`` and ``[[chaos]]``; every other table
belongs to the trainer and passes through untouched. Ours are strict: an unknown key, a wrong type or a
contradiction is one sentence (``ConfigError``), before anything is started. docs/configuration.md explains
each key.
"""

# No `from __future__ import annotations` here: torchtitan 0.2.2 reads field types of config classes raw.

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from lighthouse.security import Security, SecurityError
from lighthouse.timeouts import DEFAULT_TIMEOUT_MS, Timeouts
from torchft_plus.strict_table import (
    ConfigError,
    Override,
    load_table,
    number,
    override_value,
    parse_overrides,
)

__all__ = ["Chaos", "ConfigError", "FaultTolerance", "Launch", "LighthouseTable", "RunFile", "load_table"]

OWN_TABLES = ("fault_tolerance", "launch", "lighthouse", "security", "chaos")


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """``[fault_tolerance]``: torchtitan's names where they exist, and ours."""

    enable: bool = False
    process_group: Literal["gloo", "nccl", "rccl"] = "gloo"
    process_group_timeout_ms: int | None = number(None, 1)
    """Deadline of one collective between groups; by default ``timeout_ms``."""
    replica_id: int | str = number(0, 0)
    """Index of this group as in torchtitan, or its name. A launcher's ``REPLICA_ID`` goes before it."""
    group_size: int = number(0, 0)
    """Number of replica groups that share the data; 0: ``launch.replicas``, or 1 without a launcher."""
    min_replica_size: int = number(1, 1)
    semi_sync_method: Literal["diloco", "local_sgd"] | None = None
    """Synchronise parameters every ``sync_steps`` inner steps; None: average the gradients of each step."""
    sync_steps: int = number(5, 1)
    num_fragments: int = number(1, 1)
    module_fqns_per_model_fragment: tuple[tuple[str, ...], ...] = ()
    fragment_sync_delay: int = number(0, 0)
    fragment_update_alpha: float = number(0.0, 0)
    should_quantize: bool = False
    """The codec "int8"."""
    codec: Literal["bf16", "int8", "fp8"] | None = None
    """Send pseudo-gradients in fewer bytes."""
    error_feedback: bool = False
    sync_seconds: float | None = number(None, 0, above=True)
    """A window ends after this time, too; for groups of different speed."""
    sync_least_groups: int = number(1, 1)
    """So many groups must wait at the sync to make another one end its window."""
    sync_grace_seconds: float = number(0.0, 0)
    """And they give it so long to come by itself."""
    outer_lr: float = number(0.7, 0, above=True)
    outer_momentum: float = number(0.9, 0)
    outer_nesterov: bool = True
    lighthouse: str = ""
    """Address ("host:port") of a Lighthouse that runs already; ``TORCHFT_LIGHTHOUSE`` goes before it."""
    job_id: str = "default"
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    """The one knob: the longest time in which a healthy step makes no progress (lighthouse/timeouts.py)."""
    outage_limit_ms: int = Timeouts.__dataclass_fields__["outage_limit_ms"].default
    weighting: Literal["equal", "tokens"] = "equal"
    """How much a group's gradient counts: all the same, or by its number of tokens in the step."""
    digest_every: int = number(0, 0)
    """Write a digest of the whole state to the event log every so many steps; 0: never."""
    catch_up_max_steps: int = number(64, 1)
    """Gradients of so many steps are kept while a joiner downloads its state."""

    @property
    def timeouts(self) -> Timeouts:
        """All deadlines that follow from the knob."""
        return Timeouts(timeout_ms=self.timeout_ms, outage_limit_ms=self.outage_limit_ms)

    @property
    def replica_name(self) -> str:
        """The stable name of this group: ``replica_<index>``, or the name that was given."""
        return f"replica_{self.replica_id}" if isinstance(self.replica_id, int) else self.replica_id

    @property
    def pseudo_gradient_codec(self) -> str | None:
        """Name of the codec."""
        return self.codec or ("int8" if self.should_quantize else None)

    @property
    def fragments(self) -> int:
        """Parts of the model that are synchronised one after the other."""
        return len(self.module_fqns_per_model_fragment) or self.num_fragments

    @property
    def steps_per_commit(self) -> int:
        """Training steps that one committed step of the protocol stands for: the inner steps between two syncs, or 1."""
        return 1 if self.semi_sync_method is None else self.sync_steps // self.fragments


@dataclass(frozen=True, kw_only=True)
class Launch:
    """``[launch]``: what the local launcher starts and how it restarts it."""

    replicas: int = number(1, 1)
    ranks_per_replica: int = number(1, 1)
    module: str = "torchft_plus.titan"
    """Run as ``python -m MODULE --job.config_file FILE [overrides]``."""
    command: tuple[str, ...] = ()
    """Instead of ``module``: program and arguments; "python" is the launcher's own interpreter."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    folder: str = ""
    """Where logs, events and summary go; by default a new folder under ``outputs/``."""
    max_restarts: int = number(3, 0)
    """Restarts of a group in a row without one committed step between them; after that it is given up."""
    restart_delay_ms: int = number(100, 0)
    """Before the first restart; doubled with each further one that follows no committed step."""
    restart_delay_max_ms: int = number(30_000, 0)
    deadline_s: float = number(0.0, 0)
    """The whole run may take so long; 0: no limit."""
    stop_grace_s: float = number(15.0, 0, above=True)
    """From SIGTERM to SIGKILL when everything is ended."""
    warm_spares: int = number(0, 0)
    """Keep so many processes ready that have imported what ``module`` needs; a restart takes them."""
    gpus_per_rank: int = number(0, 0)
    """Show each replica its own GPUs only, so many a rank; 0: leave the environment as it is."""


@dataclass(frozen=True, kw_only=True)
class LighthouseTable:
    """``[lighthouse]``: the Lighthouse that the launcher starts."""

    bind: str = "127.0.0.1:0"
    min_replicas: int = number(0, 0)
    """Fewest groups in a quorum; 0: ``fault_tolerance.min_replica_size``."""
    join_timeout_ms: int = number(60_000, 1)
    restart_timeout_ms: int = number(60_000, 1)
    """After the loss of all groups at once: how long to wait for all of them to come back."""
    store: str = ""
    """SQLite file, or "memory"; by default ``lighthouse.sqlite`` in the run folder."""


@dataclass(frozen=True, kw_only=True)
class SecurityTable:
    """``[security]``: who may talk to the run. Files only: a token in a run file would be read by too many."""

    token_file: str = ""
    """Holds the token that every process of the run has."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    """Certificate, key and authority (PEM): mutual TLS."""
    tls_name: str = ""
    """The DNS name that every certificate carries; by default "torchft-plus"."""

    def resolve(self, environment: Mapping[str, str]) -> Security:
        """With the files read; variables of the environment go before the table. Raises ConfigError."""
        try:
            return Security.resolve(environment, {f.name: getattr(self, f.name) for f in fields(self)})
        except SecurityError as error:
            raise ConfigError(f"{error}.") from error


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """One ``[[chaos]]`` entry: a fault that the launcher makes, once or again and again.

    Exactly one of ``at_step``, ``at_event``, ``every_s`` says when; exactly one of ``kill``, ``stop``,
    ``terminate`` says what and whom: "replica_1" (all its ranks), "replica_1.0" (one rank), "lighthouse", or
    "random" (a group, drawn by ``seed``).
    """

    at_step: int | None = number(None, 1)
    at_event: str | None = None
    """Kind of an event in the target's own event log, such as "fetch_started"."""
    every_s: float | None = number(None, 0, above=True)
    kill: str | None = None
    stop: str | None = None
    terminate: str | None = None
    resume_after_s: float | None = number(None, 0, above=True)
    """SIGCONT so long after ``stop``; without it the target stays frozen."""
    times: int | None = number(None, 1)
    """With ``every_s``: how often at most."""
    seed: int = 0

    @property
    def action(self) -> Literal["kill", "stop", "terminate"]:
        """What is done to the target."""
        return "kill" if self.kill is not None else "stop" if self.stop is not None else "terminate"

    @property
    def target(self) -> str:
        """Whom it is done to."""
        return self.kill or self.stop or self.terminate or ""


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy of ``document`` in which overrides of our tables and of ``training.steps`` are set.

    Raises:
        ConfigError: an override of ``[[chaos]]``, or a value that is missing.
    """
    result = {
        name: dict(cast(Mapping[str, Any], t)) if isinstance(t, Mapping) else t
        for name, t in document.items()
    }
    classes: dict[str, Any] = {
        "fault_tolerance": FaultTolerance,
        "launch": Launch,
        "lighthouse": LighthouseTable,
        "security": SecurityTable,
    }
    for section, key, text in overrides:
        if section == "chaos":
            raise ConfigError(
                "--chaos.* cannot be given on the command line: edit the [[chaos]] entries of the file."
            )
        if section in classes:
            kinds = {f.name: f.type for f in fields(classes[section])}
            head, _, tail = key.partition(".")
            table = cast(dict[str, Any], result.setdefault(section, {}))
            if tail and kinds.get(head) == dict[str, str]:
                table[head] = {**table.get(head, {}), tail: text or ""}
            else:
                table[key] = override_value(text, kinds.get(key, str), f"{section}.{key}")
        elif (section, key) == ("training", "steps"):
            cast(dict[str, Any], result.setdefault(section, {}))[key] = override_value(
                text, int, "training.steps"
            )
    return result


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A checked run file."""

    path: Path
    fault_tolerance: FaultTolerance
    launch: Launch
    lighthouse: LighthouseTable
    security: SecurityTable = field(default_factory=SecurityTable)
    chaos: tuple[Chaos, ...] = ()
    has_launch: bool = False
    """The file has a [launch] table: the launcher can run it."""
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All other tables, as they stand in the file: they belong to the trainer."""
    trainer_arguments: tuple[str, ...] = ()
    """The overrides, as the trainer gets them: it reads the same file with the same command line."""

    @property
    def steps(self) -> int | None:
        """``training.steps``, if the trainer's part has it."""
        steps = self.training.get("training", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def commits(self) -> int | None:
        """Committed steps of the protocol at which the run ends: ``training.steps``, or the syncs in it."""
        return None if self.steps is None else self.steps // self.fault_tolerance.steps_per_commit

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Names of the groups that the launcher starts."""
        return tuple(f"replica_{index}" for index in range(self.launch.replicas))

    @classmethod
    def load(cls, path: Path, arguments: Sequence[str] = ()) -> "RunFile":
        """Read and check a run file with overrides from the command line.

        Raises:
            ConfigError: the file cannot be read or is no TOML, or a key, type, range or combination is wrong.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from error
        overrides = parse_overrides(arguments)
        return cls.from_document(path, apply_overrides(document, overrides), overrides)

    @classmethod
    def from_document(
        cls, path: Path, document: Mapping[str, Any], overrides: Sequence[Override] = ()
    ) -> "RunFile":
        """Check a parsed document to which ``overrides`` have been applied. Raises ConfigError."""
        for name, table in document.items():
            near = difflib.get_close_matches(name, OWN_TABLES, n=1, cutoff=0.8)
            if near and name not in OWN_TABLES:
                raise ConfigError(f"[{name}] is not a known table; did you mean [{near[0]}]?")
            if name not in OWN_TABLES and not isinstance(table, Mapping | list):
                raise ConfigError(
                    f"{name} stands outside of every table: put it under the [section] it belongs to."
                )
        entries: Any = document.get("chaos", [])
        if not isinstance(entries, list):
            raise ConfigError("chaos is a single table, expected a list of tables: write [[chaos]].")
        run = cls(
            path=path,
            fault_tolerance=load_table(
                FaultTolerance, document.get("fault_tolerance", {}), "fault_tolerance"
            ),
            launch=load_table(Launch, document.get("launch", {}), "launch"),
            lighthouse=load_table(LighthouseTable, document.get("lighthouse", {}), "lighthouse"),
            security=load_table(SecurityTable, document.get("security", {}), "security"),
            has_launch="launch" in document,
            chaos=tuple(
                load_table(Chaos, entry, f"chaos[{index}]")
                for index, entry in enumerate(cast(list[Mapping[str, Any]], entries))
            ),
            training={name: table for name, table in document.items() if name not in OWN_TABLES},
            trainer_arguments=tuple(
                word for s, k, v in overrides for word in ([f"--{s}.{k}"] if v is None else [f"--{s}.{k}", v])
            ),
        )
        _check_fault_tolerance(run.fault_tolerance)
        if run.has_launch:
            run = _check_launch(run, "lighthouse" in document)
        elif run.chaos:
            raise ConfigError("[[chaos]] needs a [launch] table: faults are made by the launcher.")
        return run


def _check_fault_tolerance(table: FaultTolerance) -> None:
    try:
        timeouts = table.timeouts
    except ValueError as error:
        raise ConfigError(f"fault_tolerance.{error}.") from error
    pg_ms = table.process_group_timeout_ms
    if pg_ms is not None and pg_ms > timeouts.timeout_ms:
        raise ConfigError(
            f"fault_tolerance.process_group_timeout_ms ({pg_ms}) is longer than fault_tolerance.timeout_ms"
            f" ({timeouts.timeout_ms}), so it would never be reached: lower it, or raise timeout_ms."
        )
    _check_semi_sync(table)
    size = table.group_size
    if size and table.min_replica_size > size:
        raise ConfigError(
            f"fault_tolerance.min_replica_size ({table.min_replica_size}) is more than group_size ({size}),"
            " so no step could ever be taken: lower it."
        )
    if size and isinstance(table.replica_id, int) and table.replica_id >= size:
        raise ConfigError(
            f"fault_tolerance.replica_id is {table.replica_id}, but group_size = {size} allows"
            f" 0 to {size - 1} only."
        )
    if isinstance(table.replica_id, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", table.replica_id):
        raise ConfigError(
            f"fault_tolerance.replica_id is {table.replica_id!r}, expected letters, digits, '_' and '-' only."
        )
    if table.lighthouse and not re.fullmatch(
        r"(https?://)?(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d+/?", table.lighthouse
    ):
        raise ConfigError(f"fault_tolerance.lighthouse is {table.lighthouse!r}, expected host:port.")


_DILOCO_KEYS = (
    "num_fragments",
    "module_fqns_per_model_fragment",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "outer_lr",
    "outer_momentum",
    "outer_nesterov",
)
_TIMED_KEYS = ("sync_least_groups", "sync_grace_seconds")
_SEMI_SYNC_KEYS = (
    "sync_steps",
    "sync_seconds",
    *_TIMED_KEYS,
    "should_quantize",
    "codec",
    "error_feedback",
    *_DILOCO_KEYS,
)


def _check_semi_sync(table: FaultTolerance) -> None:
    defaults = FaultTolerance()
    changed = [key for key in _SEMI_SYNC_KEYS if getattr(table, key) != getattr(defaults, key)]
    if table.semi_sync_method is None:
        if changed:
            raise ConfigError(
                f"fault_tolerance.{changed[0]} is about syncs every so many steps, but semi_sync_method is not set:"
                f' set it to "diloco" or "local_sgd", or remove {changed[0]}.'
            )
        return
    if table.weighting != "equal":
        raise ConfigError(
            'fault_tolerance.weighting = "tokens" weighs the gradients of a step, and semi_sync_method sends none:'
            " remove one of the two."
        )
    if table.error_feedback and table.pseudo_gradient_codec is None:
        raise ConfigError(
            "fault_tolerance.error_feedback feeds back what a codec takes away: set codec, or remove error_feedback."
        )
    if table.should_quantize and table.pseudo_gradient_codec != "int8":
        raise ConfigError(
            f'fault_tolerance.should_quantize is codec = "int8", but codec is "{table.codec}": remove one of the two.'
        )
    timed = [key for key in changed if key in _TIMED_KEYS]
    if timed and table.sync_seconds is None:
        raise ConfigError(
            f"fault_tolerance.{timed[0]} is about windows that end by time: set sync_seconds, or remove {timed[0]}."
        )
    foreign = [key for key in changed if key in _DILOCO_KEYS]
    if table.semi_sync_method == "local_sgd" and foreign:
        raise ConfigError(
            f'fault_tolerance.{foreign[0]} belongs to semi_sync_method = "diloco", and "local_sgd" averages all'
            " parameters as they are: remove one of the two."
        )
    if len(table.module_fqns_per_model_fragment) not in (0, table.num_fragments) and table.num_fragments > 1:
        raise ConfigError(
            f"fault_tolerance.num_fragments is {table.num_fragments}, but module_fqns_per_model_fragment lists"
            f" {len(table.module_fqns_per_model_fragment)} fragments: remove num_fragments."
        )
    if table.sync_steps % table.fragments:
        raise ConfigError(
            f"fault_tolerance.sync_steps is {table.sync_steps}: it must be a multiple of the number of fragments"
            f" ({table.fragments}), which are synchronised one after the other."
        )
    if table.fragment_sync_delay >= table.steps_per_commit:
        raise ConfigError(
            f"fault_tolerance.fragment_sync_delay is {table.fragment_sync_delay}: it must be below the"
            f" {table.steps_per_commit} steps between two syncs (sync_steps / number of fragments)."
        )
    if table.fragment_update_alpha > 1:
        raise ConfigError(
            f"fault_tolerance.fragment_update_alpha is {table.fragment_update_alpha}: it is a share, at most 1."
        )
    if table.outer_nesterov and table.outer_momentum == 0:
        raise ConfigError(
            "fault_tolerance.outer_momentum is 0, and outer_nesterov needs momentum: set outer_nesterov = false."
        )


def _check_launch(run: RunFile, has_lighthouse_table: bool) -> RunFile:
    """Contradictions between [launch] and the rest; fills in what follows from [launch]."""
    table, launch = run.fault_tolerance, run.launch
    if table.group_size not in (0, launch.replicas):
        raise ConfigError(
            f"fault_tolerance.group_size is {table.group_size}, but launch.replicas is {launch.replicas}: "
            "leave group_size out, or make them equal."
        )
    if table.min_replica_size > launch.replicas:
        raise ConfigError(
            f"fault_tolerance.min_replica_size ({table.min_replica_size}) is more than launch.replicas"
            f" ({launch.replicas}), so no step could ever be taken: lower it."
        )
    if not table.enable and not launch.command:
        raise ConfigError(
            "fault_tolerance.enable is false, but [launch] starts replica groups: set it to true."
        )
    if table.lighthouse and has_lighthouse_table:
        raise ConfigError(
            "fault_tolerance.lighthouse names a Lighthouse that runs already, but [lighthouse] describes one"
            " to start: remove one of the two."
        )
    if launch.warm_spares and launch.command:
        raise ConfigError("launch.warm_spares needs launch.module: a spare cannot become a launch.command.")
    if launch.restart_delay_max_ms < launch.restart_delay_ms:
        raise ConfigError(
            f"launch.restart_delay_max_ms ({launch.restart_delay_max_ms}) is below launch.restart_delay_ms"
            f" ({launch.restart_delay_ms}): raise it."
        )
    if run.lighthouse.min_replicas > launch.replicas:
        raise ConfigError(
            f"lighthouse.min_replicas ({run.lighthouse.min_replicas}) is more than launch.replicas"
            f" ({launch.replicas}), so no quorum could ever form: lower it."
        )
    for index, entry in enumerate(run.chaos):
        _check_chaos(entry, f"chaos[{index}]", run)
    complete = replace(table, group_size=launch.replicas)
    _check_fault_tolerance(complete)
    return replace(run, fault_tolerance=complete)


def _check_chaos(entry: Chaos, where: str, run: RunFile) -> None:
    moments = [k for k in ("at_step", "at_event", "every_s") if getattr(entry, k) is not None]
    if len(moments) != 1:
        raise ConfigError(
            f"{where} needs exactly one of at_step, at_event, every_s; it has {_listed(moments)}."
        )
    actions = [k for k in ("kill", "stop", "terminate") if getattr(entry, k) is not None]
    if len(actions) != 1:
        raise ConfigError(f"{where} needs exactly one of kill, stop, terminate; it has {_listed(actions)}.")
    if entry.resume_after_s is not None and entry.action != "stop":
        raise ConfigError(f"{where}.resume_after_s only makes sense with stop: remove it.")
    if entry.times is not None and entry.every_s is None:
        raise ConfigError(f"{where}.times only makes sense with every_s: remove it.")
    if entry.at_step is not None and run.steps is not None and entry.at_step >= run.steps:
        raise ConfigError(
            f"{where}.at_step is {entry.at_step}, but the run ends at training.steps = {run.steps}: lower it."
        )
    _check_target(entry, where, run)


def _check_target(entry: Chaos, where: str, run: RunFile) -> None:
    replica, _, rank = entry.target.partition(".")
    ranks = run.launch.ranks_per_replica
    name = f"{where}.{entry.action}"
    if entry.target == "lighthouse":
        if run.fault_tolerance.lighthouse:
            raise ConfigError(
                f'{name} is "lighthouse", but the launcher does not start it here: remove the entry.'
            )
    elif entry.target == "random":
        if entry.at_event is not None:
            raise ConfigError(f'{name} is "random", but at_event watches one target\'s log: name the target.')
    elif replica not in run.replica_ids:
        raise ConfigError(
            f'{name} is "{entry.target}", expected replica_0 to replica_{run.launch.replicas - 1}'
            ' (or one rank of it, as "replica_0.0"), "lighthouse" or "random".'
        )
    elif "." in entry.target and not (rank.isdecimal() and int(rank) < ranks):
        raise ConfigError(f'{name} is "{entry.target}", but {replica} has ranks 0 to {ranks - 1} only.')


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if names else "none"
