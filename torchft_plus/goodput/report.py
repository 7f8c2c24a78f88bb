"""A study as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchft_plus.goodput.ledger import Account
from torchft_plus.goodput.study import Study


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, math.ceil(share * len(ranked)) - 1))]


def as_text(study: Study) -> str:
    """The table, for a terminal. Lost steps and stall are means over the seeds."""
    seeds = f"seeds {study.first_seed} to {study.first_seed + study.seeds - 1}"
    head = f"{'policy':<14}{'goodput':>9}{'p5 .. p95':>19}{'steps':>10}{'lost steps':>12}{'stall s':>10}"
    lines = [describe(study), f"{seeds}; failures per run: {_failures(study):.1f}", "", head]
    lines[-1] += f"{'total losses':>14}"
    for policy, accounts in study.accounts.items():
        goodputs = [account.goodput for account in accounts]
        spread = f"{quantile(goodputs, 0.05):.4f} .. {quantile(goodputs, 0.95):.4f}"
        lines.append(
            f"{policy:<14}{mean(goodputs):>9.4f}{spread:>19}{mean([a.steps for a in accounts]):>10.0f}"
            f"{mean([a.lost_steps for a in accounts]):>12.1f}{mean([a.stall_s for a in accounts]):>10.1f}"
            f"{mean([float(a.total_losses) for a in accounts]):>14.2f}"
        )
    lines += ["", "share of the time with k contributing groups, in percent:"]
    lines += [f"{policy:<14}{_times(study, accounts)}" for policy, accounts in study.accounts.items()]
    return "\n".join(lines) + "\n"


def describe(study: Study) -> str:
    """The scenario in one sentence."""
    s = study.scenario
    kind = "" if math.isinf(s.mtbf_s) else f", one failure per {s.mtbf_s:g} s of the whole cluster"
    window = f", torchft-like policies average every {s.sync_every} steps" if s.sync_every > 1 else ""
    window += f" (window lost: {s.window_loss})" if s.sync_every > 1 else ""
    return (
        f"{s.replicas} groups, {s.hours:g} h{kind}, steps of {s.step_s:g} s, restart {s.restart_s:g} s, state "
        f"{s.state_gb:g} GB at {s.bandwidth_gbps:g} Gb/s, checkpoint each {s.checkpoint_minutes:g} min{window}"
    )


def as_json(study: Study) -> dict[str, Any]:
    """Everything: scenario, measured recovery times, and each seed's account under each policy."""
    scenario = {
        name: value if not isinstance(value, float) or math.isfinite(value) else None
        for name, value in asdict(study.scenario).items()
    }
    return {
        "scenario": scenario,
        "first_seed": study.first_seed,
        "seeds": study.seeds,
        "recovery": asdict(study.recovery),
        "policies": {policy: [asdict(a) for a in accounts] for policy, accounts in study.accounts.items()},
    }


def _failures(study: Study) -> float:
    accounts = next(iter(study.accounts.values()))
    return mean([float(account.failures) for account in accounts])


def _times(study: Study, accounts: Sequence[Account]) -> str:
    """Largest shares first in k, those below 0.05 % left out."""
    duration_s = study.scenario.duration_s
    shares = [
        (k, 100 * mean([account.seconds_with[k] for account in accounts]) / duration_s)
        for k in range(study.scenario.replicas, -1, -1)
    ]
    return "  ".join(f"{k}: {share:.1f}" for k, share in shares if share >= 0.05)
