"""Planted bugs: each takes one rule out of the cores. The simulator must notice every one of them.

The first fifteen are the rows of the table in the protocol's rationale; the others stand for rules that the model there did not
cover. ``promise`` says what breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from lighthouse.core import base, forming
from lighthouse.core.base import Base
from lighthouse.core.forming import Plan, Wait
from lighthouse.core.quorum_core import EPOCHS_PER_S, QuorumCore
from lighthouse.core.roster import Roster
from lighthouse.core.words import CoreConfig, Effect, Store
from lighthouse.messages import Head, Position, Quorum
from torchft_plus.manager import control_words, step_core
from torchft_plus.manager.control_words import Summary
from torchft_plus.manager.step_core import StepCore
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.semi_sync.schedule import Schedule
from torchft_plus.testing.client import BeatAnswer, Client
from torchft_plus.testing.donors import Server
from torchft_plus.testing.lighthouse_host import Disk, Lighthouse
from torchft_plus.testing.rank import Outcome, Rank

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug."""

    name: str
    rule: str
    patch: Patch
    profile: str | None = None
    """Faults under which it shows soonest; None: those that the seed chooses."""


MUTATIONS: list[Mutation] = []


def mutation(rule: str, profile: str | None = None) -> Callable[[Patch], Patch]:
    """Register a planted bug; its name is the function's."""

    def register(patch: Patch) -> Patch:
        MUTATIONS.append(Mutation(patch.__name__, rule, patch, profile))
        return patch

    return register


# --- the table --------------------------------------------------------------------------------------------------------


def _never_roll_forward(q_last: Quorum, evidence: list[Position]) -> Base:
    chosen = base.choose_base(q_last, evidence)
    return Base(_without_last(q_last, chosen), False) if chosen.rolled_forward else chosen


def _without_last(q_last: Quorum, chosen: Base) -> Head:
    step = chosen.head.step - 1
    return q_last.base if step == q_last.base.step else Head(step, q_last.id)


@mutation("L4: all of E voted, so the step is committed", "crash")
def in_doubt_retry(m: pytest.MonkeyPatch) -> None:
    m.setattr(forming, "choose_base", _never_roll_forward)


def _evidence_from(m: pytest.MonkeyPatch, counts_as_evidence: Callable[..., bool]) -> None:
    original = forming._next

    def next_quorum(view, q_last, roster, blame, asks):
        if any(q_last.rank_of(p.process) is not None for p in asks):
            return original(view, q_last, roster, blame, asks)
        strangers = [p for p in asks if counts_as_evidence(p, q_last)]
        stayers = [p for p in strangers if forming.admissible(p, blame, roster)]
        levels = [p.position.head for p in stayers if p.position is not None and p.position.level]
        if len(stayers) < view.config.min_replicas or not levels:
            return original(view, q_last, roster, blame, asks)
        head = max(levels, key=lambda h: h.step)
        holders = frozenset(p.process for p in stayers if p.position.level and p.position.head == head)
        return Plan(tuple(stayers), holders, head, False, False, "mutated")

    m.setattr(forming, "_next", next_quorum)


@mutation("L4: E must not be empty (highest step seen)")
def highest_step_seen(m: pytest.MonkeyPatch) -> None:
    _evidence_from(m, lambda peer, q_last: True)


@mutation("L4: E must not be empty (whoever stands on the last base)")
def evidence_from_the_last_base(m: pytest.MonkeyPatch) -> None:
    _evidence_from(m, lambda peer, q_last: peer.position is not None and peer.position.head == q_last.base)


@mutation("L5: gone for good is certain, not a lease", "network")
def lease_runs_out(m: pytest.MonkeyPatch) -> None:
    m.setattr(CoreConfig, "certainly_gone_ms", property(lambda self: self.timeouts.heartbeat_timeout_ms))


@mutation("M2: voted")
def no_voted_at_all(m: pytest.MonkeyPatch) -> None:
    original = StepCore.position
    m.setattr(StepCore, "position", lambda self: replace(original(self), voted=None))


@mutation("M2: voted is set before the yes, not when the vote is seen to break")
def voted_when_the_vote_breaks(m: pytest.MonkeyPatch) -> None:
    original, fence, hidden = StepCore.position, StepCore._fence, set[int]()

    def patched_fence(self: StepCore, quorum_id: int, reason: str) -> None:
        (hidden.add if reason.startswith("revoked") else hidden.discard)(id(self))
        fence(self, quorum_id, reason)

    def position(self: StepCore) -> Position:
        whole = original(self)
        return replace(whole, voted=None) if id(self) in hidden else whole

    m.setattr(StepCore, "_fence", patched_fence)
    m.setattr(StepCore, "position", position)


@mutation("heads are compared as a whole")
def heads_by_step(m: pytest.MonkeyPatch) -> None:
    def by_step(a: Head, b: Head) -> bool:
        return a.step == b.step

    def holds(position: Position, head: Head) -> bool:
        voted = position.voted is not None and position.voted.step == head.step
        return position.level and (position.head.step == head.step or voted)

    m.setattr(step_core, "same_head", by_step)
    m.setattr(control_words, "same_head", by_step)
    m.setattr(forming, "holds", holds)


@mutation("L3: only asks that echo the last id count")
def ask_without_echo(m: pytest.MonkeyPatch) -> None:
    m.setattr(Roster, "counts", lambda self, peer: peer.ask is not None)


@mutation("M4: nothing is posted at or below the floor")
def acts_after_its_ask(m: pytest.MonkeyPatch) -> None:
    original = StepCore._fence

    def fence(self: StepCore, quorum_id: int, reason: str) -> None:
        voted = self._attempt.voted
        original(self, quorum_id, reason)
        self._attempt.voted, self._attempt.waiting_since_ms = voted, None

    m.setattr(StepCore, "_fence", fence)
    m.setattr(StepCore, "in_force", lambda self: self.adopted is not None and self.ended is None)
    m.setattr(StepCore, "_abort_lanes", lambda self, quorum_id, reason: None)


@mutation("M1: a gradient counts only at the head it was computed at", "network")
def saved_gradient_of_another_head(m: pytest.MonkeyPatch) -> None:
    apply, compute = Rank._apply, Rank._compute
    kept: dict[int, object] = {}

    def patched_apply(self: Rank, outcome: Outcome):
        if outcome.kind == "refused" and self._gradient is not None:
            kept[id(self)] = self._gradient
        return apply(self, outcome)

    def patched_compute(self: Rank):
        yield from compute(self)
        if self._gradient is not None and id(self) in kept:
            self._gradient = kept.pop(id(self))

    m.setattr(Rank, "_apply", patched_apply)
    m.setattr(Rank, "_compute", patched_compute)


@mutation("M3: a commit needs the yes of all")
def commit_without_vote(m: pytest.MonkeyPatch) -> None:
    original = StepCore._finish

    def finish(self: StepCore) -> None:
        here = self._round(self._attempt.step, self._attempt.round)
        here.yes.update(range(len(self.adopted.members)))
        original(self)

    m.setattr(StepCore, "_finish", finish)


def _start_from(m: pytest.MonkeyPatch, change: Callable[..., tuple]) -> None:
    original = QuorumCore.__init__

    def init(self, config, record, clock_seconds, now_ms):
        record, clock_seconds = change(record, clock_seconds)
        original(self, config, record, clock_seconds, now_ms)

    m.setattr(QuorumCore, "__init__", init)


@mutation("L1: the last quorum is stored, not only the epoch", "lighthouse")
def only_the_epoch_is_stored(m: pytest.MonkeyPatch) -> None:
    _start_from(m, lambda record, clock: (record and replace(record, q_last=None), clock))
    m.setattr(QuorumCore, "_learn", _learn_without_quorum(QuorumCore._learn))


def _learn_without_quorum(original):
    return lambda self, peer, quorum: original(self, peer, None)


@mutation("R2: a lost store waits for every member of the reported quorum", "lighthouse")
def lost_store_takes_who_is_there(m: pytest.MonkeyPatch) -> None:
    m.setattr(QuorumCore, "_learn", _learn_without_quorum(QuorumCore._learn))


@mutation("F18: epochs grow with the clock", "lighthouse")
def epoch_without_clock(m: pytest.MonkeyPatch) -> None:
    _start_from(m, lambda record, clock: (record, 0))


@mutation("L4: one member is evidence enough")
def majority_of_the_last_quorum(m: pytest.MonkeyPatch) -> None:
    original = forming._next

    def next_quorum(view, q_last, roster, blame, asks):
        here = sum(q_last.rank_of(p.process) is not None for p in asks)
        if 2 * here <= len(q_last.members):
            return Wait("for a majority")
        return original(view, q_last, roster, blame, asks)

    m.setattr(forming, "_next", next_quorum)


# --- rules that the first model did not cover ---------------------------------------------------------------------------


@mutation("L1: stored before anybody is told", "lighthouse")
def told_before_stored(m: pytest.MonkeyPatch) -> None:
    original = QuorumCore._take

    def take(self: QuorumCore) -> list[Effect]:
        return sorted(original(self), key=lambda effect: isinstance(effect, Store))

    m.setattr(QuorumCore, "_take", take)


@mutation("F19: of two Lighthouses the older one stops", "lighthouse")
def two_lighthouses(m: pytest.MonkeyPatch) -> None:
    m.setattr(Disk, "accepts", lambda self, expected_epoch: True)
    m.setattr(Lighthouse, "_check_owner", lambda self: None)


@mutation("F19: a Lighthouse looks whether it was replaced", "lighthouse")
def lighthouse_never_looks_at_its_store(m: pytest.MonkeyPatch) -> None:
    m.setattr(Lighthouse, "_check_owner", lambda self: None)


@mutation("M7: a yes needs the data of every rank")
def vote_before_all_ranks_are_done(m: pytest.MonkeyPatch) -> None:
    original = StepCore.rank_done

    def rank_done(self: StepCore, rank, report, now_ms):
        if self._is_current(report.attempt) and not report.failure:
            self._attempt.done.update(range(self.group.group_world_size))
        return original(self, rank, report, now_ms)

    m.setattr(StepCore, "rank_done", rank_done)


@mutation("M1: weights say who contributed")
def joiners_are_counted(m: pytest.MonkeyPatch) -> None:
    original = control_words.summarise

    def summarise(blocks) -> Summary:
        return replace(original(blocks), total_weight=float(len(blocks)))

    m.setattr(step_core, "summarise", summarise)


@mutation("F37: everybody keeps the positions of all")
def own_positions_only(m: pytest.MonkeyPatch) -> None:
    original = Rank._apply

    def apply(self: Rank, outcome: Outcome):
        yield from original(self, outcome)
        own = self.group.process.replica_id
        self.positions = {name: at for name, at in self.positions.items() if name == own}

    m.setattr(Rank, "_apply", apply)


@mutation("F35: the last holder stays", "members")
def last_holder_may_leave(m: pytest.MonkeyPatch) -> None:
    original = forming._next

    def next_quorum(view, q_last, roster, blame, asks):
        return original(view, q_last, roster, blame, [p for p in asks if not p.ask.leaving])

    m.setattr(forming, "_next", next_quorum)


@mutation("F35: the last holder stays (shell)", "members")
def leaver_goes_at_once(m: pytest.MonkeyPatch) -> None:
    def may_leave(self: Rank):
        yield 0
        return True

    m.setattr(Rank, "_may_leave", may_leave)


@mutation("L7: a newcomer is refused while the old process answers", "names")
def newcomer_replaces_at_once(m: pytest.MonkeyPatch) -> None:
    original = Roster._resolve

    def resolve(self: Roster, pending):
        current = self.peers.get(pending.process.replica_id)
        if current is not None and current.connected:
            self.retire(current.process, f"it was replaced by {pending.process}")
        return original(self, pending)

    m.setattr(Roster, "_resolve", resolve)


@mutation("M3: a broken connection is no no")
def broken_connection_is_a_no(m: pytest.MonkeyPatch) -> None:
    original = StepCore._peer_gone

    def peer_gone(self: StepCore, rank: int, lost: str | None) -> None:
        if lost is not None and self.in_force():
            self.voted, self._held, self._attempt.voted = None, None, False
        original(self, rank, lost)

    m.setattr(StepCore, "_peer_gone", peer_gone)


@mutation("M8: nothing is decided in an outage", "outage")
def commits_in_an_outage(m: pytest.MonkeyPatch) -> None:
    m.setattr(StepCore, "_outage", lambda self, now_ms: False)


@mutation("an objection binds the whole group", "members")
def objection_of_one_rank_only(m: pytest.MonkeyPatch) -> None:
    original = Rank._post

    def post(self: Rank, seat) -> None:
        report = self._report

        def without(frame) -> None:
            frame.posted.objects = False
            report(frame)

        self._report = without
        original(self, seat)
        self._report = report

    m.setattr(Rank, "_post", post)


@mutation("F33: a joiner holds nothing", "joiners")
def joiner_as_holder(m: pytest.MonkeyPatch) -> None:
    def holds(position: Position, head: Head) -> bool:
        voted = position.voted is not None and (position.voted.step, position.voted.quorum_id) == (
            head.step,
            head.quorum_id,
        )
        return position.head == head or voted

    m.setattr(forming, "holds", holds)


@mutation("an abandoned session is not the newest one", "names")
def older_session_displaces_newer(m: pytest.MonkeyPatch) -> None:
    original = Roster._meet_other_incarnation

    def meet(self: Roster, current, new):
        self.pending.pop(new.process.replica_id, None)
        return original(self, current, new)

    m.setattr(Roster, "_meet_other_incarnation", meet)


@mutation("F36: which fragment is next is a function of the head", "windows")
def fragment_by_a_local_counter(m: pytest.MonkeyPatch) -> None:
    turns: dict[int, int] = {}

    def fragment(self: Schedule, committed_syncs: int) -> int:
        turns[id(self)] = turns.get(id(self), -1) + 1
        return turns[id(self)] % self.fragments

    m.setattr(Schedule, "fragment", fragment)


@mutation("A patient rank's second report may cross the answer to the first", "windows")
def boundary_answered_twice(m: pytest.MonkeyPatch) -> None:
    original = StepCore.rank_boundary

    def rank_boundary(self: StepCore, rank: int, report: pb.RankBoundary):
        self._visits = 0
        return original(self, rank, report)

    m.setattr(StepCore, "rank_boundary", rank_boundary)


@mutation("A window ends on all ranks of a group after the same inner step", "windows")
def each_rank_ends_its_window_by_itself(m: pytest.MonkeyPatch) -> None:
    def is_due(self: Rank, inner_steps: int):
        yield 0
        core = self.group.core
        return core is not None and core._awaited_by_peers()

    m.setattr(Rank, "_is_due", is_due)


@mutation("M8: a heartbeat is answered after what the core has to say", "outage")
def answered_before_the_revocation(m: pytest.MonkeyPatch) -> None:
    m.setattr(Lighthouse, "_answer", lambda self, end: end.send(BeatAnswer()))


@mutation("L1: a Lighthouse whose store fails tells nothing", "store")
def goes_on_without_its_store(m: pytest.MonkeyPatch) -> None:
    m.setattr(Lighthouse, "_store_failed", lambda self: None)


@mutation("R2: nothing is formed before the members of the newest quorum had the time to connect", "amnesia")
def lost_store_takes_the_first_report(m: pytest.MonkeyPatch) -> None:
    original = QuorumCore._adopt_reported

    def adopt(self: QuorumCore) -> None:
        self._reported_ms = -(10**9)
        original(self)

    m.setattr(QuorumCore, "_adopt_reported", adopt)


@mutation("L5: clocks may differ, so the Lighthouse waits longer than a member acts", "drift")
def no_margin_for_clocks(m: pytest.MonkeyPatch) -> None:
    m.setattr(CoreConfig, "certainly_gone_ms", property(lambda self: self.timeouts.outage_limit_ms))


@mutation("M8: heard until the answered heartbeat was sent, not until its answer was read", "outage")
def heard_when_the_answer_is_read(m: pytest.MonkeyPatch) -> None:
    original = Client._read

    def read(self: Client, session: int, message: object) -> None:
        original(self, session, message)
        if isinstance(message, BeatAnswer):
            self.last_answered_ms = self.last_heard_ms

    m.setattr(Client, "_read", read)


@mutation("F18: an epoch is above the stored one, whatever the clock says", "clock")
def epoch_of_the_clock_alone(m: pytest.MonkeyPatch) -> None:
    original = QuorumCore.__init__

    def init(self, config, record, clock_seconds, now_ms):
        original(self, config, record, clock_seconds, now_ms)
        self.epoch = int(clock_seconds * EPOCHS_PER_S) + 1

    m.setattr(QuorumCore, "__init__", init)


@mutation("L8: two quorums without a commit leave somebody out", "link")
def nobody_is_left_out(m: pytest.MonkeyPatch) -> None:
    m.setattr(QuorumCore, "_apply_blame", lambda self, plan: plan)


@mutation("M1: a step that is not finite is skipped by all")
def nothing_is_skipped(m: pytest.MonkeyPatch) -> None:
    original = control_words.summarise

    def summarise(blocks) -> Summary:
        return replace(original(blocks), skip=False)

    m.setattr(step_core, "summarise", summarise)


@mutation("L3: words of an older session are ignored", "slow")
def words_of_older_sessions_count(m: pytest.MonkeyPatch) -> None:
    m.setattr(Roster, "on_session", lambda self, process, session: self.peer(process))


@mutation("M6: a fetch of another head is no state")
def donors_may_differ_by_a_step(m: pytest.MonkeyPatch) -> None:
    original = Server.acquire

    def acquire(self: Server, head: Head):
        answer = original(self, head)
        return self.read() if answer is None or isinstance(answer, str) else answer

    m.setattr(Server, "acquire", acquire)


@mutation("M1: a stale block repeats the round for all")
def stale_data_counts(m: pytest.MonkeyPatch) -> None:
    original = control_words.summarise

    def summarise(blocks) -> Summary:
        return replace(original(blocks), stale=False)

    m.setattr(step_core, "summarise", summarise)


@mutation("P2: a total loss is announced")
def total_loss_is_kept_quiet(m: pytest.MonkeyPatch) -> None:
    original = forming._total_loss

    def total_loss(*arguments):
        plan = original(*arguments)
        return replace(plan, announce="") if isinstance(plan, Plan) else plan

    m.setattr(forming, "_total_loss", total_loss)


@mutation("L5: the announced size is that of this loss")
def steps_of_earlier_losses_are_counted(m: pytest.MonkeyPatch) -> None:
    def count(self: QuorumCore, peer, step: int) -> None:
        kept[id(self)] = max(kept.get(id(self), 0), step)
        self._highest_step = kept[id(self)]

    kept: dict[int, int] = {}
    m.setattr(QuorumCore, "_count_steps", count)


@mutation("R2: who is certainly gone is not awaited", "lighthouse")
def every_reported_member_is_awaited(m: pytest.MonkeyPatch) -> None:
    original = QuorumCore._adopt_reported

    def adopt(self: QuorumCore) -> None:
        members = list(self._roster.members(self._reported))
        if all(peer is not None and peer.connected for _, peer in members):
            original(self)

    m.setattr(QuorumCore, "_adopt_reported", adopt)
