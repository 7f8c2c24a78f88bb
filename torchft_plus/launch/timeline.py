"""What happened after each failure, read from the event logs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchft_plus.launch.event_follower import Event

_MAKERS = ("launcher", "lighthouse")
_BEFORE = 20


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that followed a failure."""

    name: str
    after_s: float
    note: str = ""


@dataclass(slots=True)
class Failure:
    """One failure of one replica group, injected or its own."""

    replica_id: str
    what: str
    step: int
    """Last step that was committed before it."""
    time: float
    injected: bool
    failed_again: bool = False
    """The same group failed again later: the time line ends there."""
    moments: list[Moment] = field(default_factory=list[Moment])
    gap_s: float | None = None
    """Longest time between two commits of a survivor, of those that the failure fell into."""
    normal_step_s: float | None = None
    """Median time between two commits of the survivors before the failure."""

    def after(self, name: str) -> float | None:
        """Seconds from the failure to the moment of that name."""
        return next((m.after_s for m in self.moments if m.name == name), None)

    @property
    def healed(self) -> bool:
        """The group came back and contributed to a committed step."""
        return self.after("joiner's first commit") is not None


@dataclass(frozen=True, slots=True)
class Trigger:
    """The beginning of a failure."""

    replica_id: str
    time: float
    what: str
    injected: bool


def target_replica(event: Event) -> str:
    """Replica that a ``chaos`` or ``exit`` event of the launcher is about."""
    return event.text("target").partition(".")[0] if event.kind == "chaos" else event.text("replica_id")


def triggers_of(events: Iterable[Event]) -> list[Trigger]:
    """Every failure of a replica group; the exit that an injected fault caused belongs to that fault."""
    triggers: list[Trigger] = []
    explained: set[str] = set()
    for event in events:
        if event.replica_id != "launcher":
            continue
        replica_id = target_replica(event)
        if event.kind == "spawn":
            explained.discard(replica_id)
        elif replica_id == "lighthouse":
            continue
        elif event.kind == "chaos" and event.text("action") != "resume":
            explained.add(replica_id)
            what = {"kill": "killed", "stop": "frozen", "terminate": "told to leave"}[event.text("action")]
            triggers.append(Trigger(replica_id, event.time, f"{event.text('target')} {what}", True))
        elif event.kind == "exit" and event.fields.get("first") and replica_id not in explained:
            explained.add(replica_id)
            how = event.text("signal") or f"exit status {event.integer('status')}"
            what = f"{replica_id}.{event.integer('rank')} died ({how})"
            triggers.append(Trigger(replica_id, event.time, what, False))
    return triggers


def failures_of(events: Sequence[Event], unit: str = "step") -> list[Failure]:
    """The time line of each failure, oldest first.

    Args:
        events: all logs of a run, in order of time.
        unit: what a committed step is: "step" or "sync".
    """
    triggers = triggers_of(events)
    return [_failure(trigger, triggers, events, unit) for trigger in triggers]


def _failure(trigger: Trigger, triggers: Sequence[Trigger], events: Sequence[Event], unit: str) -> Failure:
    later = [t.time for t in triggers if t.replica_id == trigger.replica_id and t.time > trigger.time]
    until = min(later, default=float("inf"))
    window = [e for e in events if trigger.time <= e.time < until]
    before = [e.integer("step") for e in events if e.kind == "commit" and e.time < trigger.time]
    failure = Failure(
        trigger.replica_id, trigger.what, max(before, default=0), trigger.time, trigger.injected, bool(later)
    )
    new_quorum = _mark_survivors(failure, window, unit)
    _mark_victim(failure, window, unit)
    end = failure.after("survivors' first commit")
    intervals = survivor_intervals(events, trigger.replica_id, triggers)
    normal = [b - a for a, b in intervals if b <= trigger.time]
    failure.normal_step_s = statistics.median(normal[-_BEFORE:]) if normal else None
    if new_quorum is not None and end is not None:
        touched = [b - a for a, b in intervals if b > trigger.time and a < trigger.time + end]
        failure.gap_s = max(touched, default=None)
    return failure


def _mark_survivors(failure: Failure, window: Sequence[Event], unit: str) -> int | None:
    """Detected, revoked, new quorum, first commit under it; returns the id of that quorum."""
    others = [e for e in window if e.replica_id not in (failure.replica_id, *_MAKERS)]
    exits = (e for e in window if e.kind == "exit" and e.fields.get("first"))
    seen = (e for e in exits if target_replica(e) == failure.replica_id)
    _mark(failure, "detected", seen)
    _mark(
        failure,
        "revoked",
        (
            e
            for e in window
            if e.kind in ("revoked", "revoke", "fault") and e.replica_id != failure.replica_id
        ),
    )
    formed = _mark(failure, "new quorum", (e for e in others if e.kind == "quorum"))
    if formed is None:
        return None
    quorum_id = formed.integer("quorum_id")
    commits = (e for e in others if e.kind == "commit" and e.integer("quorum_id") >= quorum_id)
    commit = _mark(failure, "survivors' first commit", commits)
    if commit is not None:
        retries = commit.integer("retries")
        note = f"{unit} {commit.integer('step')}, " + ("reduced again" if retries else "reduced once")
        failure.moments[-1] = Moment(failure.moments[-1].name, failure.moments[-1].after_s, note)
    return quorum_id


def _mark_victim(failure: Failure, window: Sequence[Event], unit: str) -> None:
    """Woken or restarted, up, state fetched, level, first commit."""
    own = [e for e in window if e.replica_id == failure.replica_id]
    makers = [e for e in window if e.replica_id == "launcher"]
    back = _mark(
        failure,
        "woken",
        (e for e in makers if e.text("action") == "resume" and _about(e, failure.replica_id)),
    )
    restarted = _mark(
        failure,
        "restarted",
        (e for e in makers if e.kind == "spawn" and e.text("replica_id") == failure.replica_id),
    )
    first = back or restarted
    if first is None:
        return
    own = [e for e in own if e.time >= first.time]
    _mark(failure, "program up", (e for e in own if e.kind == "start"))
    _mark(failure, "in a quorum", (e for e in own if e.kind == "quorum"))
    _mark_fetch(failure, [e for e in own if e.kind == "fetched"], unit)
    _mark(failure, "level", (e for e in own if e.kind == "level"))
    _mark(
        failure,
        "joiner's first commit",
        (e for e in own if e.kind == "commit" and e.fields.get("contributed")),
    )


def _about(event: Event, replica_id: str) -> bool:
    return target_replica(event) == replica_id


def _mark_fetch(failure: Failure, fetched: Sequence[Event], unit: str) -> None:
    if not fetched:
        return
    first = fetched[0].integer("step")
    parts = [e for e in fetched if e.integer("step") == first]
    size = sum(e.number("size_bytes") for e in parts)
    seconds = max(e.number("seconds") for e in parts)
    speed = f", {size / seconds / 1e6:.0f} MB/s" if seconds > 0 else ""
    note = f"{unit} {first}, {size / 1e6:.1f} MB{speed}"
    failure.moments.append(Moment("state fetched", parts[-1].time - failure.time, note))


def _mark(failure: Failure, name: str, candidates: Iterable[Event]) -> Event | None:
    event = next(iter(candidates), None)
    if event is not None:
        failure.moments.append(Moment(name, event.time - failure.time))
    return event


def survivor_intervals(
    events: Sequence[Event], victim: str, triggers: Sequence[Trigger]
) -> list[tuple[float, float]]:
    """Times of two commits in a row of one life of a group other than ``victim``, in order of their ends.

    Intervals in which that group had a failure of its own are left out.
    """
    commits: dict[str, list[list[float]]] = {}
    for event in events:
        if event.replica_id in (victim, *_MAKERS) or event.group_rank != 0:
            continue
        lives = commits.setdefault(event.replica_id, [[]])
        if event.kind == "start":
            lives.append([])
        elif event.kind == "commit":
            lives[-1].append(event.time)
    own = {r: [t.time for t in triggers if t.replica_id == r] for r in commits}
    intervals = [
        (a, b)
        for replica_id, lives in commits.items()
        for life in lives
        for a, b in pairwise(life)
        if not any(a <= time <= b for time in own[replica_id])
    ]
    return sorted(intervals, key=lambda interval: interval[1])
