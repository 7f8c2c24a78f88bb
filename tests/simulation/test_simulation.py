"""Schedules of failures against the real cores: no promise breaks, and the run comes to rest when the faults end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from torchft_plus.testing.faults import PROFILES
from torchft_plus.testing.seeds import explain, run_seed, settings_of
from torchft_plus.testing.simulation import Simulation

CI_SEEDS = 80
LONG_SEEDS = 1_000


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_schedules_of_failures(profile: str) -> None:
    for seed in range(CI_SEEDS):
        run_seed(seed, profile)


def test_mixed_settings() -> None:
    for seed in range(1_000, 1_060):
        run_seed(seed)


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_many_schedules_of_failures(profile: str) -> None:
    for seed in range(10_000, 10_000 + LONG_SEEDS):
        run_seed(seed, profile)


def test_without_faults_nothing_is_lost_and_one_quorum_is_enough() -> None:
    for seed in range(12):
        settings = settings_of(
            seed,
            "crash",
            faults=0,
            groups=3,
            ranks=2,
            expected_replicas=3,
            chaos_ms=2_000,
            join_timeout_ms=2_000,
            bad_transfer_chance=0.0,
            window=0,
        )
        report = Simulation(settings).run()
        assert report.quorums == 1 and report.incarnations == 3
        assert report.steps > 3 and report.lost_gradients == 0


RARE = {
    "a donor is lost in mid-transfer",
    "a fetch fails",
    "a lost store is filled with an older quorum",
    "a process is heard on two streams",
    "a second run is founded",
    "a total loss",
    "a transfer is bad",
    "an exit is reported again",
    "events are decided together",
    "the clock is behind an earlier start",
    "the store fails",
}


def test_every_fault_strikes_and_every_situation_comes_up() -> None:
    """A profile whose faults never hit anything would prove nothing."""
    wanted = RARE | {kind for weights in PROFILES.values() for kind in weights}
    hits: Counter[str] = Counter()
    for seed in range(2_000, 2_100):
        for profile in ("all", "amnesia", "clock", "names", "outage", "pause", "store", "transfer"):
            simulation = Simulation(settings_of(seed, profile))
            simulation.run()
            hits += simulation.world.hits
        if set(hits) >= wanted:
            return
    pytest.fail(f"never: {sorted(wanted - set(hits))}")


def test_a_run_depends_on_nothing_but_its_seed() -> None:
    """Not on the order of sets, which differs between processes."""
    code = (
        "from torchft_plus.testing.seeds import settings_of\n"
        "from torchft_plus.testing.simulation import Simulation\n"
        "for seed in range(40, 52):\n"
        "    run = Simulation(settings_of(seed), trace=True)\n"
        "    print(run.run(), hash_of(run.world.trace_lines()))\n"
    )
    code = (
        "import hashlib\nhash_of = lambda lines: hashlib.md5('\\n'.join(lines).encode()).hexdigest()\n" + code
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]


def test_a_failure_tells_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from mutations import MUTATIONS

    mutation = next(m for m in MUTATIONS if m.name == "commit_without_vote")
    mutation.patch(monkeypatch)
    with pytest.raises(AssertionError) as failure:
        for seed in range(50):
            run_seed(seed)
    text = str(failure.value)
    assert text.startswith("M3")
    assert "replay: python -m torchft_plus.testing --seed" in text
    assert "--- lighthouse" in text and "formed" in text
    assert text.count("\n") > 20


def test_a_failure_that_does_not_come_again_is_said() -> None:
    assert "did not fail" in explain(0, None, "a sentence")
