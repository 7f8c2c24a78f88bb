"""What belongs to a seed, how to run one, and what to print when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from lighthouse.timeouts import Timeouts
from torchft_plus.testing.faults import PROFILES
from torchft_plus.testing.simulation import Report, Simulation
from torchft_plus.testing.world import Settings

T = TypeVar("T")
TRACE_TAIL = 120
SMALL_DRIFT = 0.0048
"""Two clocks then differ by less than the 1 % that rule L5 adds to the outage limit, rounding included."""
LARGE_DRIFT = 0.1


def settings_of(seed: int, profile: str | None = None, **changes: Any) -> Settings:
    """The settings that belong to a seed; ``changes`` override them."""
    random = Random(f"settings {seed}")

    def pick(choices: Sequence[T]) -> T:
        return choices[int(random.random() * len(choices))]

    groups = pick((2, 2, 3, 3, 3, 4, 4, 5))
    outage_ms = pick((2_000, 4_000, 20_000))
    settings = Settings(
        seed=seed,
        groups=groups,
        ranks=pick((1, 1, 1, 2, 2, 3)),
        min_replicas=pick((1, 1, 1, 2)),
        expected_replicas=pick((None, groups, groups)),
        timeouts=Timeouts(1_000, outage_ms, heartbeat_override_ms=pick((150, 250, 400))),
        join_timeout_ms=pick((300, 1_000, 2_000)),
        restart_timeout_ms=pick((200, 1_000, 3_000)),
        reconnect_grace_ms=pick((0, 100, 100)),
        restart_grace_ms=pick((1_500, 3_000)),
        equal_start=random.random() < 0.5,
        disk=pick(("none", "none", "own", "shared")),
        reports_exits=random.random() < 0.7,
        compute_ms=pick(((5, 40), (10, 120), (50, 60), (1, 400))),
        apply_ms=pick(((0, 2), (0, 30), (0, 200))),
        transfer_ms=pick(((1, 30), (20, 400), (300, 1_500))),
        delay_ms=pick(((0, 2), (0, 8), (1, 30))),
        slow_message_chance=pick((0.0, 0.01, 0.05)),
        slow_message_ms=pick((60, 300, 900)),
        profile=pick(list(PROFILES)),
        faults=pick((2, 4, 8, 12)),
        chaos_ms=pick((3_000, 5_000, 8_000)),
        window=pick((0, 0, 0, 2, 5, 20)),
        fragments=pick((1, 2, 3)),
        settle_ms=pick(((0, 0), (0, 3), (0, 30))),
        clock_drift=pick((0.0, 0.0, SMALL_DRIFT)),
        bad_transfer_chance=pick((0.0, 0.0, 0.2)),
    )
    if profile is not None:
        changes["profile"] = profile
    return _fit(replace(settings, **changes))


def _fit(settings: Settings) -> Settings:
    """What a profile needs to be what it says."""
    if settings.profile == "windows" and not settings.window:
        settings = replace(settings, window=4)
    if settings.window:
        settings = replace(settings, compute_ms=_inner_step_ms(settings.compute_ms, settings.window))
    if settings.profile == "crash":
        # A slow network may cost a healthy group its step.
        return replace(settings, slow_message_chance=0.0, only_deaths=True)
    if settings.profile == "names":
        return replace(
            settings, reports_exits=False, groups=min(settings.groups, 3)
        )  # newcomers have to wait
    if settings.profile == "joiners":
        # Deaths around the votes of quorums in which somebody is still without the state.
        slow = replace(settings, equal_start=False, transfer_ms=(300, 1_500), min_replicas=1)
        slow = replace(slow, slow_message_chance=0.0)
        return replace(
            slow, groups=min(settings.groups, 3), aimed_chance=0.9, moments=("vote", "block", "commit")
        )
    if settings.profile == "transfer":
        slow = replace(settings, equal_start=False, transfer_ms=(300, 1_500), bad_transfer_chance=0.3)
        return replace(slow, min_replicas=1, aimed_chance=0.9, moments=("transfer", "transfer", "behind"))
    if settings.profile == "link":
        return replace(settings, cut_link=True, groups=max(3, settings.groups), min_replicas=1)
    if settings.profile in ("clock", "drift"):
        return _with_bad_clocks(settings)
    if settings.profile == "outage":
        # The limit has to be reached within the run, and whoever is left has to found anew.
        timeouts = replace(settings.timeouts, outage_limit_ms=2_000)
        return replace(settings, timeouts=timeouts, min_replicas=1, chaos_ms=12_000, restart_timeout_ms=200)
    return settings


def _inner_step_ms(step_ms: tuple[int, int], window: int) -> tuple[int, int]:
    """A window must end as soon as others may wait for it: within ``timeout_ms``."""
    return (1, 2 * step_ms[1] // window + 2)


def _with_bad_clocks(settings: Settings) -> Settings:
    """Either clocks for which rule L5 allows and outages up to the limit, or worse clocks and no such outage."""
    if settings.seed % 2 == 0:
        timeouts = replace(settings.timeouts, outage_limit_ms=600_000)
        return replace(settings, timeouts=timeouts, clock_drift=LARGE_DRIFT)
    timeouts = replace(settings.timeouts, outage_limit_ms=4_000)
    return replace(
        settings,
        timeouts=timeouts,
        clock_drift=SMALL_DRIFT,
        chaos_ms=14_000,
        restart_timeout_ms=0,
        min_replicas=1,
        compute_ms=(5, 40),
        window=0,
        delay_ms=(0, 2),
        slow_message_chance=0.0,
    )


def run_seed(seed: int, profile: str | None = None) -> Report:
    """Run one seed.

    Raises:
        AssertionError: a promise was broken: the replay command, the last events and the stories of the cores.
    """
    try:
        return Simulation(settings_of(seed, profile)).run()
    except AssertionError as error:
        raise AssertionError(explain(seed, profile, str(error))) from error


def explain(seed: int, profile: str | None, sentence: str) -> str:
    """Run a failing seed again with its trace, and tell what happened."""
    simulation = Simulation(settings_of(seed, profile), trace=True)
    try:
        simulation.run()
        again = "the second run did not fail: the code has changed, or the run depends on something else than its seed"
    except AssertionError as error:
        again = str(error)
    trace = simulation.world.trace_lines()[-TRACE_TAIL:]
    lines = [sentence, f"replay: {replay_command(seed, profile)}", *trace, *simulation.stories(), again]
    return "\n".join(lines)


def replay_command(seed: int, profile: str | None) -> str:
    """The command that shows a seed again, event by event."""
    chosen = f" --profile {profile}" if profile is not None else ""
    return f"python -m torchft_plus.testing --seed {seed}{chosen} --trace"
