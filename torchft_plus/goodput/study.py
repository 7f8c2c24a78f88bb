"""All seeds under all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchft_plus.goodput.checkpoint import run_checkpoint
from torchft_plus.goodput.failures import Failure, failures_of
from torchft_plus.goodput.ledger import Account
from torchft_plus.goodput.ours import Ours
from torchft_plus.goodput.rounds import Recovery, measure
from torchft_plus.goodput.scenario import Scenario
from torchft_plus.goodput.torchft import DEFAULT, TUNED, Torchft


@dataclass(frozen=True, slots=True)
class Study:
    """A scenario and what came out of it: for each policy one account a seed."""

    scenario: Scenario
    seeds: int
    first_seed: int
    recovery: Recovery
    accounts: dict[str, tuple[Account, ...]]


def run_study(
    scenario: Scenario, policies: Sequence[str], seeds: int, *, first_seed: int = 0, trials: int = 6
) -> Study:
    """Run every seed under every policy; all policies meet the same failures.

    Args:
        trials: deaths of each kind that are played through the real cores (only if "ours" is asked for).

    Raises:
        AssertionError: the real cores broke a promise in a trial.
    """
    wanted = "ours" in policies
    recovery = measure(scenario.replicas, trials, first_seed) if wanted else Recovery((), (), ())
    accounts: dict[str, list[Account]] = {policy: [] for policy in policies}
    for seed in range(first_seed, first_seed + seeds):
        failures = failures_of(scenario, seed)
        for policy in policies:
            accounts[policy].append(run_policy(policy, scenario, failures, recovery, seed))
    return Study(
        scenario, seeds, first_seed, recovery, {policy: tuple(rows) for policy, rows in accounts.items()}
    )


def run_policy(
    policy: str, scenario: Scenario, failures: Sequence[Failure], recovery: Recovery, seed: int
) -> Account:
    """One run under one policy."""
    match policy:
        case "ours":
            return Ours(scenario, recovery, seed).run(failures)
        case "torchft":
            return Torchft(scenario, DEFAULT).run(failures)
        case "torchft-tuned":
            return Torchft(scenario, TUNED).run(failures)
        case "checkpoint":
            return run_checkpoint(scenario, failures)
        case _:
            raise ValueError(f"no policy is called {policy!r}")
