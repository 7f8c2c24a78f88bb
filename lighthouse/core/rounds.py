"""When a round opens, and how urgent it is (rule L2). Reads the roster, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.core import forming
from lighthouse.core.blame import Blame
from lighthouse.core.roster import Roster


@dataclass(slots=True)
class Round:
    """A new quorum is being formed."""

    reason: str
    now: bool
    """False: members were asked to stop at the next step boundary."""
    first_ask_ms: int | None = None


def urgent_reason(roster: Roster, fault: str | None, round_: Round | None) -> str | None:
    """Why the last quorum cannot go on; None if it can.

    Args:
        roster: who is there.
        fault: a fault that a member reported, for people.
        round_: the round that is open.
    """
    members = list(roster.members(roster.q_last))
    for process, peer in members:
        if peer is None:
            return f"{process.replica_id} is gone: {roster.gone.get(process, 'no longer there')}"
        if peer.lost is not None or peer.overdue:
            return f"{process.replica_id} is {'overdue' if peer.overdue else f'lost: {peer.lost}'}"
    if fault is not None:
        return fault
    if round_ is not None:
        return None  # who asks now does so at the boundary, as it was told to
    for process, peer in members:
        if peer is not None and peer.ask is not None and not peer.ask.leaving and roster.counts(peer):
            return f"{process.replica_id} gave the quorum up"
    return None


def wish(roster: Roster, blame: Blame) -> str | None:
    """Who wants to join or to leave; None if nobody does."""
    for peer in roster.peers.values():
        if not roster.counts(peer) or peer.ask is None:
            continue
        if not roster.is_member(peer):
            if forming.admissible(peer, blame, roster):
                return f"{peer.replica_id} wants to join"
        elif peer.ask.leaving:
            return f"{peer.replica_id} wants to leave"
    return None


def first_ask_ms(roster: Roster) -> int | None:
    """When the first ask came that counts: of a member, if there is a last quorum and its run goes on."""
    anybody = roster.q_last is None or roster.run_has_ended()
    times = [
        peer.asked_ms
        for peer in roster.peers.values()
        if roster.counts(peer) and (anybody or roster.is_member(peer))
    ]
    return min(times, default=None)
