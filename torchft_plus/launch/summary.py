"""The verdict on a run, from its event logs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from torchft_plus.launch.event_follower import Event
from torchft_plus.launch.policy import End
from torchft_plus.launch.progress import loss_of
from torchft_plus.launch.timeline import Failure, failures_of, target_replica

TOTAL_LOSS = "total loss"
"""Beginning of the Lighthouse's announcement that the chain goes on from an older head (rule L5)."""


class ExitCode(IntEnum):
    """Exit status of ``torchft-plus run`` (128 + n if signal n ended it)."""

    GOOD = 0
    NOT_FINISHED = 1
    REFUSED = 2
    REPLICAS_DIFFER = 3
    STEPS_LOST = 4


@dataclass(slots=True)
class DigestVerdict:
    """Comparison of the digests that replicas wrote for the same (step, quorum_id) and group rank."""

    expected: bool
    """The run file asked for digests, and there is more than one replica."""
    compared: int = 0
    unequal: int = 0
    first_unequal_step: int | None = None

    @property
    def good(self) -> bool:
        """All that were compared are equal, and if any were expected, some were compared."""
        return self.unequal == 0 and (self.compared > 0 or not self.expected)


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    exit_code: int
    finished: bool
    reason: str
    steps: int
    steps_wanted: int | None
    loss: float | None
    seconds: float
    digests: DigestVerdict
    lost_steps: list[tuple[str, int, str]]
    """(replica_id, step, reason) of steps that a survivor computed and that were not committed."""
    forked_steps: list[int]
    """Steps committed under two quorums without an announced loss: two lineages."""
    steps_per_commit: int = 1
    """More than 1: steps are syncs, and so many inner steps lie between two of them."""
    failures: list[Failure] = field(default_factory=list[Failure])
    total_losses: list[str] = field(default_factory=list[str])
    """What the Lighthouse announced when training had to go on from an older head."""

    def as_json(self) -> dict[str, Any]:
        """Plain values for summary.json."""
        healed = [failure.healed for failure in self.failures]
        value = asdict(self)
        for failure, is_healed in zip(value["failures"], healed, strict=True):
            failure["healed"] = is_healed
        return value


def summarise(
    events: Sequence[Event],
    end: End,
    *,
    steps_wanted: int | None,
    digests_expected: bool,
    steps_per_commit: int = 1,
    signal: int = 0,
) -> Summary:
    """Judge a run.

    Args:
        events: all logs of the run; they are sorted by time here.
        end: how the restart policy ended it.
        steps_wanted: committed steps (or syncs) at which the run ends, if known.
        digests_expected: the run file asked for digests of more than one replica.
        steps_per_commit: training steps that a committed step stands for: more than 1 between two syncs.
        signal: the signal that ended the run, or 0.
    """
    events = sorted(events, key=lambda event: event.time)
    commits = [e for e in events if e.kind == "commit"]
    last = max(commits, key=lambda e: e.integer("step"), default=None)
    announcements = [e.text("text") for e in events if e.kind == "announce" and e.replica_id == "lighthouse"]
    total_losses = [text for text in announcements if text.startswith(TOTAL_LOSS)]
    summary = Summary(
        exit_code=0,
        finished=end.finished,
        reason=end.reason,
        steps=last.integer("step") if last is not None else 0,
        steps_wanted=steps_wanted,
        loss=loss_of(last) if last is not None else None,
        seconds=events[-1].time - events[0].time if events else 0.0,
        digests=compare_digests(events, expected=digests_expected),
        lost_steps=lost_steps_of(events, windows=steps_per_commit > 1),
        forked_steps=[] if total_losses else forked_steps_of(commits),
        steps_per_commit=steps_per_commit,
        failures=failures_of(events, "sync" if steps_per_commit > 1 else "step"),
        total_losses=total_losses,
    )
    summary.exit_code = 128 + signal if signal else _exit_code(summary, end)
    return summary


def _exit_code(summary: Summary, end: End) -> int:
    if end.refused:
        return ExitCode.REFUSED
    if not summary.finished:
        return ExitCode.NOT_FINISHED
    if not summary.digests.good or summary.forked_steps:
        return ExitCode.REPLICAS_DIFFER
    return ExitCode.STEPS_LOST if summary.lost_steps or summary.total_losses else ExitCode.GOOD


def compare_digests(events: Sequence[Event], *, expected: bool) -> DigestVerdict:
    """Compare digests of the same (step, quorum_id, group rank) over the replicas."""
    digests: dict[tuple[int, int, int], dict[str, set[str]]] = {}
    for event in events:
        if event.kind == "digest":
            key = (event.integer("step"), event.integer("quorum_id"), event.group_rank)
            digests.setdefault(key, {}).setdefault(event.replica_id, set()).add(event.text("digest"))
    verdict = DigestVerdict(expected)
    for (step, _, _), by_replica in sorted(digests.items()):
        if len(by_replica) < 2:
            continue
        verdict.compared += 1
        if len(set[str]().union(*by_replica.values())) > 1:
            verdict.unequal += 1
            if verdict.first_unequal_step is None:
                verdict.first_unequal_step = step
    return verdict


def lost_steps_of(events: Sequence[Event], windows: bool = False) -> list[tuple[str, int, str]]:
    """Steps that survivors computed in vain.

    A group is a survivor while its present life has contributed to a commit and no fault was injected into it
    since, nor did it die.

    Args:
        events: in order of time.
        windows: steps are windows of inner steps: one that did not count in its sync was trained in vain, too.
    """
    surviving: set[str] = set()
    lost: list[tuple[str, int, str]] = []
    for event in events:
        if event.replica_id == "launcher" and event.kind in ("chaos", "exit", "spawn"):
            surviving.discard(target_replica(event))
        elif event.kind in ("start", "behind"):
            if event.group_rank == 0:
                surviving.discard(event.replica_id)
        elif event.kind == "commit" and event.fields.get("contributed"):
            surviving.add(event.replica_id)
        elif event.kind == "commit" and windows and event.replica_id in surviving:
            lost.append((event.replica_id, event.integer("step"), "its window did not count"))
        elif event.kind == "refused" and event.replica_id in surviving:
            lost.append((event.replica_id, event.integer("step"), event.text("reason")))
    return lost


def forked_steps_of(commits: Sequence[Event]) -> list[int]:
    """Steps that were committed under more than one quorum."""
    quorums: dict[int, set[int]] = {}
    for event in commits:
        quorums.setdefault(event.integer("step"), set()).add(event.integer("quorum_id"))
    return sorted(step for step, ids in quorums.items() if len(ids) > 1)
