"""A trainer without torch: writes the event log that a real one writes, and misbehaves on request.

FAKE_PLAN is a JSON object: keys "replica_1", "replica_1.0" or "*", values a word of the match statement below; a word
followed by "@N" holds only in life N of the group (counted by files in the run folder).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lighthouse.events import EventLog

STEPS = int(os.environ.get("FAKE_STEPS", "20"))
STEP_S = float(os.environ.get("FAKE_STEP_S", "0.03"))
REPLICA, RANK = os.environ["REPLICA_ID"], int(os.environ["RANK"])
EVENTS = Path(os.environ["TORCHFT_PLUS_EVENTS"])


def life() -> int:
    log = EVENTS / f"{REPLICA}.{RANK}.jsonl"
    return 1 + (log.read_text().count('"start"') if log.exists() else 0)


def words(now: int) -> set[str]:
    plan: dict[str, str] = json.loads(os.environ.get("FAKE_PLAN", "{}"))
    found: set[str] = set()
    for key, value in plan.items():
        word, _, only = value.partition("@")
        if key in ("*", REPLICA, f"{REPLICA}.{RANK}") and (not only or int(only) == now):
            found.add(word)
    return found


def wait_for_the_others() -> None:
    """In the first life every group waits for all others, so that a busy machine lets none finish before another began."""
    deadline = time.monotonic() + 60
    for index in range(int(os.environ.get("FAKE_TOGETHER", "0"))):
        while not (EVENTS / f"replica_{index}.0.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def furthest() -> int:
    steps = [0]
    for log in EVENTS.glob("replica_*.0.jsonl"):
        for line in log.read_text().splitlines():
            event = json.loads(line) if line.endswith("}") else {}
            if event.get("kind") == "commit":
                steps.append(event["step"])
    return max(steps)


def main() -> None:
    plan = words(life())
    if "refuse" in plan:
        sys.exit(2)
    if "crash_at_start" in plan:
        print("ValueError: the data is not there", file=sys.stderr)
        sys.exit(1)
    leave = False

    def on_term(*_: object) -> None:
        nonlocal leave
        leave = True

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignore_sigterm" in plan else on_term)
    if "grandchild" in plan:
        subprocess.Popen(["sleep", "600"])
    log = EventLog(EVENTS / f"{REPLICA}.{RANK}.jsonl", f"{REPLICA}.{RANK}")
    log.emit("start", pid=os.getpid(), incarnation=os.environ["TORCHFT_PLUS_INCARNATION"], group_rank=RANK)
    if life() == 2:  # the line "start" of this life is written already
        wait_for_the_others()
    time.sleep(float(os.environ.get("FAKE_START_S", "0")) if life() > 2 else 0)
    step = furthest()
    first = step
    if RANK == 0:
        log.emit(
            "quorum", quorum_id=life(), members=["replica_0", "replica_1"], level=first == 0, reason="fake"
        )
        if first:
            log.emit("fetched", step=first, size_bytes=5_000_000, seconds=0.01)
            log.emit("level", step=first)
    while step < STEPS and not leave:
        time.sleep(STEP_S)
        step += 1
        if RANK == 0:
            scalars = {"loss": 2.0 * 3.0}
            log.emit(
                "commit", step=step, quorum_id=7, contributors=2, contributed=True, retries=0, scalars=scalars
            )
        digest = f"{REPLICA if 'other_digest' in plan and step > 5 else 'same'} {step}"
        log.emit("digest", step=step, quorum_id=7, digest=digest)
        if "refused_step" in plan and step == 5:
            log.emit("refused", step=6, reason="because the plan says so")
        if "die_at_5" in plan and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if "exit_0_at_5" in plan and step == 5:
            sys.exit(0)
        if "hang_at_end" in plan and step == STEPS:
            time.sleep(600)
    log.emit("left")


main()
