"""Each planted bug is found: the simulator would notice if the cores lost one of their rules."""

from __future__ import annotations

import pytest
from mutations import MUTATIONS, Mutation

from torchft_plus.testing.seeds import settings_of
from torchft_plus.testing.simulation import Simulation

SEEDS = 500
FIRST_SEED = {"lost_store_takes_the_first_report": 2_500}
"""Where the seeds begin of what one run in several hundred meets; else at 0."""
QUICK = {
    "acts_after_its_ask": 12,
    "commit_without_vote": 3,
    "nobody_is_left_out": 6,
    "nothing_is_skipped": 12,
    "stale_data_counts": 12,
    "total_loss_is_kept_quiet": 12,
    "goes_on_without_its_store": 80,
    "each_rank_ends_its_window_by_itself": 12,
    "evidence_from_the_last_base": 120,
    "fragment_by_a_local_counter": 12,
    "heads_by_step": 12,
    "highest_step_seen": 12,
    "joiners_are_counted": 12,
    "leaver_goes_at_once": 40,
    "objection_of_one_rank_only": 40,
    "own_positions_only": 12,
    "saved_gradient_of_another_head": 12,
    "told_before_stored": 12,
    "vote_before_all_ranks_are_done": 12,
}
"""Those that are found soon, and within how many seeds: run each time."""


def _found_by(mutation: Mutation, seeds: int, monkeypatch: pytest.MonkeyPatch) -> int | None:
    mutation.patch(monkeypatch)
    first = FIRST_SEED.get(mutation.name, 0)
    for seed in range(first, first + seeds):
        try:
            Simulation(settings_of(seed, mutation.profile)).run()
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.name in QUICK], ids=lambda m: m.name)
def test_planted_bug_is_found_soon(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found_by(mutation, QUICK[mutation.name], monkeypatch) is not None, mutation.rule


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_planted_bug_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found_by(mutation, SEEDS, monkeypatch) is not None, mutation.rule


def test_every_quick_one_exists() -> None:
    assert set(QUICK) <= {m.name for m in MUTATIONS}
