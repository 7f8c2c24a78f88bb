from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from torchft_plus.launch.event_follower import Event
from torchft_plus.launch.progress import ReplicaProgress, RunProgress, State
from torchft_plus.launch.view import View, sentence_of, short_quorum


def event(source: str, kind: str, **fields: Any) -> Event:
    replica_id, _, rank = source.partition(".")
    return Event(replica_id, int(rank or 0), 100.0, kind, fields=fields)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (event("launcher", "chaos", action="kill", target="replica_1", step=12), "kill replica_1 at step 12"),
        (
            event("launcher", "exit", replica_id="replica_1", rank=1, status=0, signal="SIGKILL", first=True),
            "SIGKILL",
        ),
        (
            event("launcher", "exit", replica_id="replica_1", rank=0, status=3, signal="", first=True),
            "exit status 3",
        ),
        (event("launcher", "spawn", replica_id="replica_1", life=2), "replica_1 is started again (life 2)"),
        (
            event("lighthouse", "formed", quorum_id=(7 << 32) + 5, members=["a", {"replica_id": "b"}]),
            "q5: a, b",
        ),
        (
            event("replica_2.1", "fetched", step=9, size_bytes=2e6, seconds=0.5),
            "replica_2.1 fetched the state of step 9",
        ),
        (event("lighthouse", "announce", text="total loss: all"), "total loss: all"),
        (event("replica_0.0", "fatal", reason="no disk"), "replica_0.0 failed: no disk"),
    ],
)
def test_what_happens_is_said(seen: Event, words: str) -> None:
    assert words in (sentence_of(seen) or "")


@pytest.mark.parametrize(
    "seen",
    [
        event("replica_0.0", "commit", step=3),
        event("replica_0.0", "announce", text="the same, heard by a member"),
        event("launcher", "exit", replica_id="replica_1", rank=0, status=0, signal="SIGKILL", first=False),
        event("launcher", "spawn", replica_id="replica_1", life=1),
        event("replica_0.0", "a kind of tomorrow"),
    ],
)
def test_the_rest_is_not(seen: Event) -> None:
    assert sentence_of(seen) is None


def progress() -> RunProgress:
    run = RunProgress.of(["replica_0", "replica_1"])
    run.step = 7
    run.replicas["replica_0"] = ReplicaProgress(
        "replica_0", State.TRAINING, step=7, loss=3.25, quorum_id=(9 << 32) + 4, participants=2
    )
    return run


@pytest.mark.parametrize("terminal", [True, False])
def test_one_line_a_replica_on_a_terminal_and_in_a_log(terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with View(console, steps=40) as view:
        view.say("hello")
        view.refresh(progress())
        view.refresh(progress())  # too soon: not again
    text = output.getvalue()
    assert "hello" in text and "3.2500" in text and "q4" in text and "training" in text
    assert text.count("3.2500") == (2 if terminal else 1)  # a live table is drawn once more at its end
    assert ("7/40" in text) == terminal
    assert ("\x1b[" in text) == terminal


def test_syncs_are_shown_as_the_steps_between_them() -> None:
    output = io.StringIO()
    with View(Console(file=output, width=160), steps=400, steps_per_commit=20) as view:
        view.refresh(progress())
        view.see(Event("replica_1", 0, 1.0, "level", fields={"step": 7}))
    assert "replica_0 training step 140 loss" in output.getvalue()
    assert "replica_1 is level again at sync 7" in output.getvalue()


def test_markup_in_a_message_is_shown_and_not_obeyed() -> None:
    output = io.StringIO()
    with View(Console(file=output, width=120), steps=None) as view:
        view.say("[rank0] said [red]stop[/red] [/nothing]")
    assert "[rank0] said [red]stop[/red] [/nothing]" in output.getvalue()


def test_a_quorum_before_the_first_has_no_number() -> None:
    assert short_quorum(0) == "-"
