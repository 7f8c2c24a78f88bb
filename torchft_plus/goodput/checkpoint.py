"""Checkpoint-restart: one failure stops everybody, and the work since the last checkpoint is done again."""

from __future__ import annotations

from collections.abc import Sequence

from torchft_plus.goodput.failures import Failure
from torchft_plus.goodput.ledger import Account, Ledger, whole
from torchft_plus.goodput.scenario import Scenario


def run_checkpoint(scenario: Scenario, failures: Sequence[Failure]) -> Account:
    """One run. A failure is noticed at once, and checkpoints cost nothing: both are in this policy's favour."""
    ledger = Ledger(scenario.replicas, scenario.checkpoint_steps)
    start_s = 0.0
    for failure in failures:
        if failure.group is None:
            continue
        ledger.failures += 1
        if failure.at_s >= start_s:
            computed_s = failure.at_s - start_s
            ledger.note_time(start_s, 0)
            ledger.note_time(failure.at_s, scenario.replicas)
            steps = whole(computed_s, scenario.step_s)
            ledger.commit(steps, scenario.replicas)
            ledger.lost_steps += max(0.0, computed_s / scenario.step_s - steps)
            ledger.roll_back()
        ready_s = failure.at_s + scenario.restart_s + scenario.transfer_s
        ledger.stall_s += min(ready_s, scenario.duration_s) - max(
            failure.at_s, min(start_s, scenario.duration_s)
        )
        start_s = ready_s
    end_s = scenario.duration_s
    ledger.note_time(min(start_s, end_s), 0)
    ledger.note_time(end_s, scenario.replicas)
    ledger.commit(whole(end_s - start_s, scenario.step_s) if start_s < end_s else 0, scenario.replicas)
    return ledger.account(end_s, scenario.step_s)
