"""Whether and how the next quorum forms (rules L3-L5, R3). Reads the roster, changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lighthouse.core.base import choose_base, choose_restart_base, holds, holds_after_reload
from lighthouse.core.blame import Blame
from lighthouse.core.roster import MAX_REMEMBERED, Peer, Roster
from lighthouse.core.words import CoreConfig
from lighthouse.messages import Head, Position, Process, Quorum


@dataclass(frozen=True, slots=True)
class Plan:
    """The next quorum, but for its id."""

    members: tuple[Peer, ...]
    holders: frozenset[Process]
    base: Head
    reload: bool
    committed: bool
    """True if something was committed under the last quorum."""
    reason: str
    announce: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing forms yet; ``text`` says for whom or what."""

    text: str
    awaited: frozenset[str] = frozenset()
    """Nothing can form before these have asked (or time has passed)."""
    release_leavers: bool = False
    """Nobody needs those who want to leave, although nothing forms."""
    total_loss: bool = False
    """Nobody holds the state, and nobody can come back with it (rule L5): ``restart_timeout`` runs."""
    start_over: bool = False
    """Nobody who is there has any state, not even an initial one: they have to restart."""


@dataclass(frozen=True, slots=True)
class View:
    """What the decision depends on besides the roster."""

    config: CoreConfig
    first_ask_ms: int | None
    """When the first ask that counts came (of a member, if there is a last quorum)."""
    total_loss_since_ms: int | None
    highest_step: int


def admissible(peer: Peer, blame: Blame, roster: Roster) -> bool:
    """May this process be in a quorum now? Not while it is overdue (F26) or left out (L8)."""
    return not peer.overdue and roster.wakeups.due(blame.out_until_ms(peer.replica_id))


def decide(view: View, roster: Roster, blame: Blame) -> Plan | Wait:
    """The next quorum, or why there is none yet."""
    asks = sorted((p for p in roster.peers.values() if roster.counts(p)), key=lambda p: _order(p, roster))
    if roster.q_last is None:
        return _first(view, roster, [p for p in asks if admissible(p, blame, roster)])
    awaited = _awaited(roster.q_last, roster)
    if awaited and not _join_timeout_over(view, roster):
        return Wait(awaited_text(roster, awaited), awaited=frozenset(awaited))
    if asks and all(p.ask is not None and p.ask.leaving for p in asks):
        return Wait("for anybody: all have left", release_leavers=True)
    return _next(view, roster.q_last, roster, blame, asks)


def _first(view: View, roster: Roster, asks: list[Peer]) -> Plan | Wait:
    """Rule R3: nothing is stored and nobody reports a quorum."""
    config = view.config
    stayers = [p for p in asks if p.ask is not None and not p.ask.leaving]
    if len(stayers) < config.min_replicas:
        return Wait(f"for {config.min_replicas} replicas (min_replicas), {len(stayers)} have asked")
    if config.expected_replicas is not None:
        complete = len(stayers) >= config.expected_replicas
        missing = f"for {config.expected_replicas} replicas (expected_replicas), {len(stayers)} have asked"
    else:
        silent = [p.replica_id for p in roster.peers.values() if p.connected and p.ask is None]
        complete = (config.min_replicas >= 2 or config.alone_at_once) and not silent
        missing = f"for {', '.join(silent) or 'more replicas'}, {len(stayers)} have asked"
    if not complete and not _join_timeout_over(view, roster):
        return Wait(f"{missing}; at most until join_timeout_ms ({config.join_timeout_ms})")
    plan = _restart(stayers, "first quorum")
    if plan is None:
        return Wait("for a replica that holds any state", start_over=not roster.pending)
    if roster.q_last is None and (plan.base.step or view.highest_step):
        lost = view.highest_step - plan.base.step
        text = f"nothing is stored of this job: training goes on from step {plan.base.step}, the newest that is here"
        more = f"; a total loss, {lost} steps or more are lost" if lost > 0 else ""
        plan = replace(plan, announce=text + more)
    return plan


def _next(view: View, q_last: Quorum, roster: Roster, blame: Blame, asks: list[Peer]) -> Plan | Wait:
    evidence = [p for p in asks if roster.is_member(p)]
    admitted = [p for p in asks if admissible(p, blame, roster)]
    stayers = [p for p in admitted if p.ask is not None and not p.ask.leaving]
    if not evidence:
        return _total_loss(view, q_last, roster, stayers, None)
    base = choose_base(q_last, [p.position for p in evidence if p.position is not None])
    holders = [p for p in stayers if _holds(p, base.head)]
    if not holders:
        # The only ones who hold the state want to leave: they stay until another one is level (F35).
        holders = [p for p in admitted if _holds(p, base.head)]
        stayers = [p for p in admitted if p.ask is None or not p.ask.leaving or _holds(p, base.head)]
    if not holders:
        return _total_loss(view, q_last, roster, stayers, base.head)
    least = view.config.min_replicas
    if len(stayers) < least:
        held = any(p.ask is not None and not p.ask.leaving for p in holders)
        return Wait(f"for {least} replicas (min_replicas), {len(stayers)} have asked", release_leavers=held)
    what = f"step {base.head.step} is rolled forward: everyone left had voted for it"
    if not base.rolled_forward:
        what = f"goes on from step {base.head.step}"
    return Plan(
        members=tuple(sorted(stayers, key=lambda p: not _holds(p, base.head))),
        holders=frozenset(p.process for p in holders),
        base=base.head,
        reload=False,
        committed=base.head.quorum_id == q_last.id,
        reason=what,
    )


def _total_loss(
    view: View, q_last: Quorum, roster: Roster, stayers: list[Peer], base: Head | None
) -> Plan | Wait:
    """Rule L5: nobody who is there holds the state."""
    missing = [
        f"{process} ({state})"
        for process, peer in roster.members(q_last)
        if (state := _may_still_hold(process, peer, roster, view.config, base)) is not None
    ]
    if missing:
        return Wait(f"for the state, which may be held by {', '.join(missing)}")
    if roster.run_has_ended():
        return _after_the_end(view, roster, stayers)
    known = {m.process.replica_id for m in q_last.members}
    absent = sorted(known - {p.replica_id for p in stayers})
    since_ms = view.total_loss_since_ms
    over = since_ms is not None and roster.wakeups.due(since_ms + view.config.restart_timeout_ms)
    if absent and not over:
        # Who wants to leave holds nothing that is missed here, and its next life may be one of those.
        text = f"for {', '.join(absent)} to restart, at most restart_timeout_ms"
        text = f"{text} ({view.config.restart_timeout_ms})"
        return Wait(text, total_loss=True, release_leavers=True)
    if len(stayers) < view.config.min_replicas:
        text = f"for {view.config.min_replicas} replicas (min_replicas), {len(stayers)} have asked"
        return Wait(text, total_loss=True, release_leavers=True)
    plan = _restart(stayers, "total loss")
    base_here = plan.base if plan is not None else None
    others = [p for p in roster.peers.values() if p not in stayers and p.connected]
    later = [p.process for p in others if not _is_leaving(p) and _brings_more(p.position, base_here)]
    later += [
        p.process for p in roster.pending.values() if _brings_more(p.hello.position, base_here, disk=True)
    ]
    if later:
        names = ", ".join(str(process) for process in later)
        return Wait(f"for {names} to take part: what it holds is newer", total_loss=True)
    if plan is None:
        # A new process that waits for the place of its predecessor brings an initial state.
        text = "for replicas that restart with an initial state"
        return Wait(text, total_loss=True, start_over=not roster.pending)
    text = f"total loss: nobody holds the state of quorum {q_last.id} any more; {_loss(view, plan)}"
    return replace(plan, reload=True, reason=text, announce=text)


def _after_the_end(view: View, roster: Roster, stayers: list[Peer]) -> Plan | Wait:
    """The last run has ended in good order: begin as at the very first, and say if something is missing."""
    plan = _first(view, roster, stayers)
    if isinstance(plan, Wait):
        return plan
    text = f"the last run has ended; {_loss(view, plan)}"
    return replace(
        plan, reload=True, reason=text, announce=text if plan.base.step < view.highest_step else ""
    )


def _loss(view: View, plan: Plan) -> str:
    lost = max(0, view.highest_step - plan.base.step)
    return f"training goes on from step {plan.base.step}, {lost} steps are lost"


def _is_leaving(peer: Peer) -> bool:
    return peer.ask is not None and peer.ask.leaving


def _brings_more(position: Position | None, base: Head | None, *, disk: bool = False) -> bool:
    """True if somebody who is here brings a later state than ``base``: its ask is on the way, it stands still, is left
    out for a time, or waits for the place of its predecessor (which an initial state is no reason to wait for: ``disk``).
    """
    if position is None:
        return False
    heads = [position.head] if position.level and not (disk and position.head.step == 0) else []
    heads += [position.disk_head] if position.disk_head is not None else []
    return any(base is None or head.order > base.order for head in heads)


def _may_still_hold(
    process: Process, peer: Peer | None, roster: Roster, config: CoreConfig, base: Head | None
) -> str | None:
    """Why this member of the last quorum may still hold the state; None if it certainly does not."""
    if process in roster.gone or peer is None:
        return None
    if config.lost_is_gone and (peer.lost is not None or peer.overdue):
        return None
    if roster.counts(peer):
        holds_it = base is not None and _holds(peer, base)
        return "stands still" if holds_it and peer.overdue else "is left out" if holds_it else None
    if peer.connected:
        return "has not asked"
    silent_for_good = roster.wakeups.due(peer.heard_ms + config.certainly_gone_ms)
    return None if silent_for_good else "lost, but not certainly gone"


def _restart(stayers: list[Peer], reason: str) -> Plan | None:
    """From the newest head that anybody has, in memory or on disk; None if nobody has any state."""
    positions = [p.position for p in stayers if p.position is not None]
    base = choose_restart_base(positions)
    if base is None:
        return None
    holders = [p for p in stayers if _can_hold(p, base)]
    from_disk = any(not _holds(p, base) for p in holders)
    ordered = sorted(stayers, key=lambda p: not _can_hold(p, base))
    return Plan(tuple(ordered), frozenset(p.process for p in holders), base, from_disk, False, reason)


def _awaited(q_last: Quorum, roster: Roster) -> list[str]:
    """Members that are expected to ask. Newcomers are not awaited: survivors never wait for a joiner (P4)."""
    return [
        process.replica_id
        for process, peer in roster.members(q_last)
        if peer is not None and peer.lost is None and not peer.overdue and not roster.counts(peer)
    ]


def awaited_text(roster: Roster, awaited: Iterable[str]) -> str:
    """For whom a round waits, in order of rank, for people."""
    peers = [roster.peers[replica_id] for replica_id in awaited if replica_id in roster.peers]
    peers.sort(key=lambda peer: _order(peer, roster))
    names = [f"{p.replica_id} (no member is heard)" if p.held else p.replica_id for p in peers]
    return f"for {', '.join(names)} to ask"


def _join_timeout_over(view: View, roster: Roster) -> bool:
    first_ms = view.first_ask_ms
    return first_ms is not None and roster.wakeups.due(first_ms + view.config.join_timeout_ms)


def _holds(peer: Peer, base: Head) -> bool:
    return peer.position is not None and holds(peer.position, base)


def _can_hold(peer: Peer, base: Head) -> bool:
    return peer.position is not None and holds_after_reload(peer.position, base)


def _order(peer: Peer, roster: Roster) -> tuple[int, tuple[tuple[int, str | int], ...]]:
    """Members keep their order, newcomers follow by name; replica_10 comes after replica_9."""
    return (roster.ranks.get(peer.process, len(roster.ranks)), natural(peer.replica_id))


@lru_cache(maxsize=MAX_REMEMBERED)
def natural(name: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key that orders the numbers in names by value."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part)) if part.isascii() and part.isdigit() else (1, part) for part in parts)


def spared(plan: Plan, blame: Blame, least: int, oldest_first: Sequence[Process]) -> Peer | None:
    """Whom to leave out if these members have failed together (rule L8); None if nobody can be spared."""
    members = [p.process for p in plan.members]
    candidates = [
        process
        for process in oldest_first
        if process in members and (len(plan.holders) > 1 or process not in plan.holders)
    ]
    if len(members) <= least or not candidates:
        return None
    chosen = blame.most_blamed(members, candidates)
    return next(p for p in plan.members if p.process == chosen)
