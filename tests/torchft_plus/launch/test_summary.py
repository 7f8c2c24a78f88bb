"""The verdict, on event lists made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from torchft_plus.launch.event_follower import Event
from torchft_plus.launch.policy import End
from torchft_plus.launch.summary import Summary, compare_digests, summarise
from torchft_plus.launch.summary_text import summary_lines


def event(source: str, time: float, kind: str, **fields: Any) -> Event:
    replica_id, _, rank = source.partition(".")
    return Event(replica_id, int(rank or 0), time, kind, fields=fields)


def commit(source: str, time: float, step: int, quorum_id: int = 1, **fields: Any) -> Event:
    values = {"contributors": 2, "contributed": True, "scalars": {"loss": 6.0}, **fields}
    return event(source, time, "commit", step=step, quorum_id=quorum_id, **values)


def digest(source: str, step: int, value: str, quorum_id: int = 1) -> Event:
    return event(source, float(step), "digest", step=step, quorum_id=quorum_id, digest=value)


def judge(events: list[Event], *, finished: bool = True, expected: bool = False, signal: int = 0) -> Summary:
    end = End(finished, "all groups have ended")
    return summarise(events, end, steps_wanted=10, digests_expected=expected, signal=signal)


KILLED = [
    event("launcher", 0.0, "spawn", replica_id="replica_0"),
    event("launcher", 0.0, "spawn", replica_id="replica_1"),
    event("replica_0.0", 0.5, "start", incarnation="a"),
    event("replica_1.0", 0.5, "start", incarnation="b"),
    *(commit(f"replica_{r}.0", float(step), step) for step in (1, 2, 3) for r in (0, 1)),
    event("launcher", 3.2, "chaos", action="kill", target="replica_1", step=3),
    event("launcher", 3.21, "exit", replica_id="replica_1", rank=0, status=0, signal="SIGKILL", first=True),
    event("lighthouse", 3.22, "revoke", quorum_id=1, now=True),
    event("replica_0.0", 3.23, "quorum", quorum_id=2, members=["replica_0"]),
    commit("replica_0.0", 4.4, 4, 2, retries=1, contributors=1, scalars={"loss": 2.5}),
    event("launcher", 3.5, "spawn", replica_id="replica_1", life=2),
    event("replica_1.0", 7.0, "start", incarnation="c"),
    commit("replica_0.0", 5.4, 5, 2),
    event("replica_1.0", 7.1, "quorum", quorum_id=3, members=["replica_0", "replica_1"]),
    commit("replica_0.0", 6.4, 6, 2),
    commit("replica_1.0", 7.2, 7, 3, contributed=False),
    commit("replica_0.0", 7.2, 7, 3),
    event("replica_1.0", 7.5, "fetched", step=6, size_bytes=80_000_000, seconds=0.2),
    event("replica_1.1", 7.6, "fetched", step=6, size_bytes=20_000_000, seconds=0.1),
    event("replica_1.0", 7.7, "level", step=7),
    commit("replica_1.0", 8.3, 8, 3, scalars={"loss": 3.0}),
    commit("replica_0.0", 8.3, 8, 3, scalars={"loss": 3.0}),
]


def test_the_time_line_of_a_kill() -> None:
    summary = judge(KILLED)
    assert (summary.exit_code, summary.steps, summary.loss) == (0, 8, 1.5)
    (failure,) = summary.failures
    assert (failure.what, failure.step, failure.injected, failure.healed) == (
        "replica_1 killed",
        3,
        True,
        True,
    )
    after = {m.name: round(m.after_s, 3) for m in failure.moments}
    assert after == {
        "detected": 0.01,
        "revoked": 0.02,
        "new quorum": 0.03,
        "survivors' first commit": 1.2,
        "restarted": 0.3,
        "program up": 3.8,
        "in a quorum": 3.9,
        "state fetched": 4.4,
        "level": 4.5,
        "joiner's first commit": 5.1,
    }
    notes = {m.name: m.note for m in failure.moments}
    assert notes["survivors' first commit"] == "step 4, reduced again"
    assert notes["state fetched"] == "step 6, 100.0 MB, 500 MB/s"  # both ranks
    assert failure.gap_s == pytest.approx(1.4) and failure.normal_step_s == 1.0
    text = "\n".join(summary_lines(summary))
    assert "Failure 1: replica_1 killed after step 3, injected." in text
    assert "longest gap between commits: 1.400 s; a normal step takes 1.000 s" in text
    json.dumps(summary.as_json())
    assert summary.as_json()["failures"][0]["healed"] is True


def test_in_a_run_with_windows_the_words_are_about_syncs() -> None:
    end = End(True, "all groups have ended")
    events = [*KILLED, commit("replica_0.0", 9.0, 9, 3, contributed=False, contributors=1)]
    summary = summarise(events, end, steps_wanted=9, digests_expected=False, steps_per_commit=20)
    assert summary.lost_steps == [("replica_0", 9, "its window did not count")]
    assert summary.exit_code == 4
    text = "\n".join(summary_lines(summary))
    assert "9 of 9 syncs committed (180 inner steps)" in text
    assert "replica_1 killed after sync 3" in text and "sync 4, reduced again" in text
    assert "longest gap between syncs: 1.400 s; a normal window takes 1.000 s" in text
    assert "Inner steps lost by survivors: 20." in text
    assert "step 4" not in text
    without = summarise(KILLED, end, steps_wanted=8, digests_expected=False, steps_per_commit=20)
    assert (without.lost_steps, without.exit_code) == ([], 0), "a joiner's first window is not lost"


def test_the_order_in_which_logs_are_read_does_not_matter() -> None:
    assert judge(list(reversed(KILLED))).as_json() == judge(KILLED).as_json()


def test_a_death_of_its_own_and_one_that_nobody_heals() -> None:
    events = [
        event("launcher", 0.0, "spawn", replica_id="replica_1"),
        commit("replica_0.0", 1.0, 1),
        event("launcher", 2.0, "exit", replica_id="replica_1", rank=1, status=7, signal="", first=True),
        event(
            "launcher", 2.0, "exit", replica_id="replica_1", rank=0, status=0, signal="SIGKILL", first=False
        ),
    ]
    (failure,) = judge(events).failures
    assert failure.what == "replica_1.1 died (exit status 7)"
    assert not failure.injected and not failure.healed
    assert "it had not contributed again when the run ended" in "\n".join(summary_lines(judge(events)))


def test_an_exit_in_the_life_of_a_fault_belongs_to_the_fault() -> None:
    events = [
        event("launcher", 0.0, "spawn", replica_id="replica_1"),
        event("launcher", 1.0, "chaos", action="stop", target="replica_1.0"),
        event("launcher", 2.0, "chaos", action="resume", target="replica_1.0"),
        event("launcher", 2.5, "exit", replica_id="replica_1", rank=0, status=1, signal="", first=True),
        event("launcher", 2.6, "spawn", replica_id="replica_1", life=2),
        event("launcher", 3.0, "exit", replica_id="replica_1", rank=0, status=1, signal="", first=True),
        event("launcher", 4.0, "chaos", action="kill", target="lighthouse"),
    ]
    first, second = judge(events).failures
    assert (first.what, first.failed_again) == ("replica_1.0 frozen", True)
    assert (first.after("woken"), first.after("detected")) == (1.0, 1.5)
    assert (second.what, second.failed_again) == ("replica_1.0 died (exit status 1)", False)
    assert "when it failed again" in "\n".join(summary_lines(judge(events)))


def test_two_groups_at_once_do_not_spoil_each_others_gap() -> None:
    events = [
        *(commit(f"replica_{r}.0", float(step), step) for step in range(1, 5) for r in range(3)),
        *(event("launcher", 4.5, "chaos", action="kill", target=f"replica_{r}") for r in (1, 2)),
        event("replica_0.0", 4.6, "quorum", quorum_id=2),
        commit("replica_0.0", 5.5, 5, 2),
        *(event(f"replica_{r}.0", 20.0, "start", incarnation="x") for r in (1, 2)),
        *(commit(f"replica_{r}.0", 21.0, 20, 3) for r in (1, 2)),
    ]
    assert [f.gap_s for f in judge(events).failures] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("events", "expected", "code", "words"),
    [
        ([], False, 0, "not asked for"),
        ([], True, 3, "NO DIGESTS COMPARED"),
        ([digest("replica_0.0", 1, "a")], True, 3, "NO DIGESTS COMPARED"),
        ([digest("replica_0.0", 1, "a"), digest("replica_1.0", 1, "a")], True, 0, "1 compared, all equal"),
        (
            [digest("replica_0.0", 1, "a"), digest("replica_1.1", 1, "b")],
            True,
            3,
            "NO DIGESTS",
        ),  # other shard
        (
            [digest("replica_0.0", 1, "a"), digest("replica_1.0", 1, "b", 2)],
            True,
            3,
            "NO DIGESTS",
        ),  # other head
        ([digest("replica_0.0", 4, "a"), digest("replica_1.0", 4, "b")], False, 3, "first at step 4"),
        ([digest("replica_0.0", 4, "a"), digest("replica_0.0", 4, "b")], False, 0, "not asked for"),
    ],
)
def test_the_comparison_of_digests(events: list[Event], expected: bool, code: int, words: str) -> None:
    summary = judge(events, expected=expected)
    assert summary.exit_code == code
    assert words in "\n".join(summary_lines(summary))


def test_the_first_unequal_step_is_the_smallest() -> None:
    values = [(3, "a", "a"), (9, "x", "y"), (6, "x", "y"), (7, "z", "z")]
    events = [digest(f"replica_{r}.0", v[0], v[1 + r]) for v in values for r in (0, 1)]
    verdict = compare_digests(events, expected=True)
    assert (verdict.compared, verdict.unequal, verdict.first_unequal_step) == (4, 2, 6)


def test_only_survivors_lose_steps() -> None:
    refused = event("replica_0.0", 9.0, "refused", step=5, reason="no quorum")
    survivor = [commit("replica_0.0", 8.0, 4), refused]
    assert judge(survivor).exit_code == 4
    stopped = event("launcher", 8.5, "chaos", action="stop", target="replica_0.0")
    assert judge([survivor[0], stopped, refused]).exit_code == 0
    behind = event("replica_0.0", 8.5, "behind", base_step=9)
    assert judge([survivor[0], behind, refused]).exit_code == 0
    assert judge([refused]).exit_code == 0  # never contributed


def test_two_lineages_are_found_unless_a_loss_was_announced() -> None:
    events = [commit("replica_0.0", 1.0, 1, 1), commit("replica_1.0", 1.0, 1, 2)]
    summary = judge(events)
    assert summary.exit_code == 3 and summary.forked_steps == [1]
    assert "TWO LINEAGES" in "\n".join(summary_lines(summary))
    announced = event("lighthouse", 0.9, "announce", text="total loss: 4 steps are done again")
    lost = judge([*events, announced])
    assert lost.exit_code == 4 and not lost.forked_steps
    assert "TOTAL LOSS: 4 steps are done again." in summary_lines(lost)
    waiting = event("lighthouse", 0.9, "announce", text="no new quorum yet: waiting for replica_0")
    assert judge([*events, waiting]).exit_code == 3


def test_many_failures_are_a_table() -> None:
    events = list(KILLED)
    for turn in range(10):
        later = [replace(e, time=e.time + 10.0 * turn) for e in KILLED]
        events += later if turn else []
    lines = summary_lines(judge(events))
    assert "10 failures (seconds):" in lines
    assert sum("replica_1 killed after step" in line for line in lines) == 10
    assert "  0.010     1.400  5.100   replica_1 killed after step 3" in lines
    assert any("median 1.4" in line for line in lines)


@pytest.mark.parametrize(
    ("end", "signal", "code"),
    [
        (End(True, ""), 0, 0),
        (End(False, "given up: replica_1"), 0, 1),
        (End(False, "", refused=True), 0, 2),
        (End(False, "SIGINT"), 2, 130),
        (End(False, "SIGTERM"), 15, 143),
    ],
)
def test_how_it_ended_decides_the_exit_status(end: End, signal: int, code: int) -> None:
    summary = summarise([], end, steps_wanted=None, digests_expected=False, signal=signal)
    assert summary.exit_code == code
