"""When what fails, by seed; the same for every policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from torchft_plus.goodput.scenario import Scenario


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    """A failure of a group, or of the Lighthouse (``group`` None)."""

    at_s: float
    group: int | None
    silent: bool = False


def failures_of(scenario: Scenario, seed: int) -> list[Failure]:
    """The failures of one run in the order of time.

    A group fails at the same rate whether it trains, restarts or waits.
    """
    random = Random(f"failures {seed}")
    found: list[Failure] = []
    at_s = _first(random, scenario)
    while at_s < scenario.duration_s:
        group = int(random.random() * scenario.replicas)
        found.append(Failure(at_s, group, random.random() < scenario.silent_share))
        at_s += scenario.mtbf_s if scenario.regular else _interval(random, scenario.mtbf_s)
    at_s = _interval(random, scenario.lighthouse_mtbf_s)
    while at_s < scenario.duration_s:
        found.append(Failure(at_s, None))
        at_s += _interval(random, scenario.lighthouse_mtbf_s)
    return sorted(found, key=lambda failure: failure.at_s)


def _first(random: Random, scenario: Scenario) -> float:
    if scenario.regular and math.isfinite(scenario.mtbf_s):
        return random.random() * scenario.mtbf_s
    return _interval(random, scenario.mtbf_s)


def _interval(random: Random, mean_s: float) -> float:
    return random.expovariate(1 / mean_s) if math.isfinite(mean_s) else math.inf
