"""What people see while a run goes on: a live line a replica, and a sentence for everything that happens."""

from __future__ import annotations

import time
from typing import Any, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchft_plus.launch.event_follower import Event
from torchft_plus.launch.progress import ReplicaProgress, RunProgress, State

_REFRESH_S = 0.5
_PLAIN_LINE_S = 5.0
_COUNTER_BITS = 0xFFFF_FFFF

_STYLES = {State.TRAINING: "green", State.FROZEN: "magenta", State.RESTARTING: "red", State.LEFT: "dim"}


def short_quorum(quorum_id: int) -> str:
    """A quorum id for people: its counter, without the Lighthouse's epoch in the upper half."""
    return f"q{quorum_id & _COUNTER_BITS}" if quorum_id else "-"


def sentence_of(event: Event, unit: str = "step") -> str | None:
    """What an event means, for people; None for those that only matter to the machine.

    Args:
        event: of any log.
        unit: what a committed step is: "step" or "sync".
    """
    who = event.replica_id
    match event.kind:
        case "chaos":
            at = f" at {unit} {event.integer('step')}" if event.integer("step") else ""
            return f"injected: {event.text('action')} {event.text('target')}{at}"
        case "exit":
            return _exit_sentence(event)
        case "spawn" if event.integer("life", 1) > 1:
            return f"{event.text('replica_id')} is started again (life {event.integer('life')})"
        case "formed":
            names = _member_names(event.fields.get("members"))
            reason = event.text("reason")
            quorum = short_quorum(event.integer("quorum_id"))
            return f"quorum {quorum}: {names}" + (f" ({reason})" if reason else "")
        case "fetched":
            size, seconds = event.number("size_bytes"), event.number("seconds")
            speed = f", {size / seconds / 1e6:.0f} MB/s" if seconds > 0 else ""
            rank, step = event.group_rank, event.integer("step")
            return f"{who}.{rank} fetched the state of {unit} {step}: {size / 1e6:.1f} MB{speed}"
        case "level":
            return f"{who} is level again at {unit} {event.integer('step')}"
        case "refused":
            return f"{who} did not commit {unit} {event.integer('step')}: {event.text('reason')}"
        case "announce" if who == "lighthouse":
            return event.text("text")
        case "fatal":
            return f"{who}.{event.group_rank} failed: {event.text('reason')}"
        case _:
            return None


def _exit_sentence(event: Event) -> str | None:
    replica_id, name = event.text("replica_id"), event.text("signal")
    if not event.fields.get("first"):
        return None
    return (
        f"{replica_id}.{event.integer('rank')} died ({name or 'exit status ' + str(event.integer('status'))})"
    )


def _member_names(members: object) -> str:
    names: list[str] = []
    for member in cast(list[object], members) if isinstance(members, list) else []:
        name = cast(dict[str, Any], member).get("replica_id") if isinstance(member, dict) else member
        names.append(str(name).partition("/")[0])
    return ", ".join(names) or "nobody"


class View:
    """Shows a run on a console: a live table on a terminal, plain lines elsewhere.

    Args:
        console: where to.
        steps: training steps at which the run ends, if known.
        steps_per_commit: training steps that a committed step stands for: more than 1 between two syncs.
    """

    def __init__(self, console: Console, steps: int | None, steps_per_commit: int = 1) -> None:
        self._steps_per_commit = steps_per_commit
        self._console = console
        self._steps = steps
        self._began = time.time()
        self._shown_at = 0.0
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a sentence with its time since the start."""
        self._print(time.time(), text)

    def see(self, event: Event) -> None:
        """Print the sentence of an event, if it has one."""
        text = sentence_of(event, "sync" if self._steps_per_commit > 1 else "step")
        if text is not None:
            self._print(event.time, text)

    def refresh(self, progress: RunProgress) -> None:
        """Show where every replica is, at most every so often."""
        now = time.monotonic()
        if now - self._shown_at < (_REFRESH_S if self._live is not None else _PLAIN_LINE_S):
            return
        self._shown_at = now
        if self._live is not None:
            self._live.update(self._table(progress), refresh=True)
        elif progress.step:
            parts = [f"{r.replica_id} {r.state.value} {self._numbers(r)}" for r in progress.replicas.values()]
            self._print(time.time(), "; ".join(parts))

    def _numbers(self, replica: ReplicaProgress) -> str:
        loss = "-" if replica.loss is None else f"{replica.loss:.4f}"
        step = replica.step * self._steps_per_commit
        return f"step {step} loss {loss} {short_quorum(replica.quorum_id)} of {replica.participants}"

    def _table(self, progress: RunProgress) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("replica", "state", "step", "loss", "quorum", "participants", "life"):
            table.add_column(name, justify="left" if name in ("replica", "state") else "right", min_width=6)
        of = f"/{self._steps}" if self._steps else ""
        for replica in progress.replicas.values():
            table.add_row(
                replica.replica_id,
                Text(replica.state.value, style=_STYLES.get(replica.state, "yellow")),
                f"{replica.step * self._steps_per_commit}{of}",
                "-" if replica.loss is None else f"{replica.loss:.4f}",
                short_quorum(replica.quorum_id),
                str(replica.participants),
                str(replica.lives),
            )
        return table

    def _print(self, moment: float, text: str) -> None:
        self._console.print(Text(f"{max(0.0, moment - self._began):7.2f} s  {text}"), soft_wrap=True)
