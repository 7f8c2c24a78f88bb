from __future__ import annotations

import random
from pathlib import Path

from lighthouse.events import EventLog
from torchft_plus.launch.event_follower import EventFollower
from torchft_plus.launch.progress import RunProgress, State


def test_what_was_appended_comes_once_and_in_order_whatever_the_pieces(tmp_path: Path) -> None:
    logs = {
        name: EventLog(tmp_path / f"{name}.jsonl", name) for name in ("replica_0.0", "team.7.1", "lighthouse")
    }
    for number in range(50):
        for name, log in logs.items():
            log.emit("commit", step=number, name=name)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    folder = tmp_path / "follow"
    folder.mkdir()
    follower = EventFollower(folder)
    draw = random.Random(1)
    at = dict.fromkeys(whole, 0)
    events = follower.read()
    while any(at[name] < len(data) for name, data in whole.items()):
        for name, data in whole.items():
            size = draw.randrange(200)
            with (folder / name).open("ab") as file:
                file.write(data[at[name] : at[name] + size])
            at[name] += size
        events += follower.read()
    assert follower.read() == []
    follower.close()
    by_source = {(e.replica_id, e.group_rank): [] for e in events}
    for event in events:
        by_source[(event.replica_id, event.group_rank)].append(event.integer("step"))
    assert by_source == {
        source: list(range(50)) for source in [("replica_0", 0), ("team.7", 1), ("lighthouse", 0)]
    }


def test_a_torn_line_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "replica_0.0.jsonl"
    log.write_bytes(
        b'{"time": 1.0, "kind": "commit", "st\n[1]\n{"kind": "x"}\n{"time": 2.0, "kind": "level", "step": 3}\n'
    )
    follower = EventFollower(tmp_path)
    (event,) = follower.read()
    assert (event.kind, event.time, event.integer("step")) == ("level", 2.0, 3)
    assert (event.number("none"), event.text("step"), event.integer("kind", 5)) == (0.0, "", 5)
    follower.close()


def test_progress_knows_an_old_life_from_a_new_one(tmp_path: Path) -> None:
    launcher = EventLog(tmp_path / "launcher.jsonl", "launcher")
    log = EventLog(tmp_path / "replica_0.0.jsonl", "replica_0.0")
    follower, progress = EventFollower(tmp_path), RunProgress.of(["replica_0"])

    def apply() -> list[bool]:
        current: list[bool] = []
        for event in follower.read():
            progress.apply(event)
            current.append(progress.is_current(event))
        return current

    replica = progress.replicas["replica_0"]
    launcher.emit("spawn", replica_id="replica_0", incarnation="a", pids=[1])
    log.emit("start", incarnation="a")
    log.emit("commit", step=1, quorum_id=5, contributors=1, contributed=True, scalars={"loss": 4.0})
    assert apply()[-1] is True
    assert (replica.state, replica.loss, progress.training) == (State.TRAINING, 4.0, ["replica_0"])
    launcher.emit("exit", replica_id="replica_0", status=0, signal="SIGKILL", first=True)
    apply()
    assert (replica.state, progress.training) == (State.RESTARTING, [])
    launcher.emit("spawn", replica_id="replica_0", incarnation="b", pids=[2])
    apply()
    assert (replica.state, replica.lives, replica.committed) == (State.STARTING, 2, False)
    log.emit("start", incarnation="b")
    log.emit("behind", base_step=7)
    apply()
    assert replica.state is State.BEHIND
    log.emit("commit", step=8, quorum_id=6, contributors=2, contributed=False, scalars={"loss": 4.0})
    apply()
    assert (replica.state, replica.committed, progress.step) == (State.BEHIND, True, 8)
    log.emit("level", step=9)
    apply()
    assert progress.training == ["replica_0"]
    follower.close()
