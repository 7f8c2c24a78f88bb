"""From which head a quorum goes on (rules L4, L5, R3). Pure functions of the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lighthouse.messages import Head, Position, Quorum, Vote


@dataclass(frozen=True, slots=True)
class Base:
    """The chosen head, and why in one clause."""

    head: Head
    rolled_forward: bool


def choose_base(q_last: Quorum, evidence: Sequence[Position]) -> Base:
    """The head that ``q_last`` may have committed last (rule L4).

    Args:
        q_last: the last quorum formed.
        evidence: positions of fenced members of ``q_last`` (floor >= its id); at least one.

    A commit under ``q_last`` needed the yes of every member, so its commits are bounded by any fenced member: the
    greatest head among them, or one step more if none of them contradicts that step.
    """
    assert evidence, "one fenced member of the last quorum is the evidence"
    committed = [p.head for p in evidence if p.head.quorum_id == q_last.id]
    head = max(committed, key=lambda h: h.step, default=q_last.base)
    next_vote = Vote(head.step + 1, q_last.id)
    if all(p.voted == next_vote for p in evidence):
        return Base(Head(next_vote.step, q_last.id), rolled_forward=True)
    return Base(head, rolled_forward=False)


def holds(position: Position, base: Head) -> bool:
    """True if this member has the state of ``base`` or everything it needs to commit it (rule L4).

    It must be level either way: a joiner that voted holds the averages of the step, but not the state to apply
    them to.
    """
    vote = Vote(base.step, base.quorum_id)
    return position.level and (position.head == base or position.voted == vote)


def holds_after_reload(position: Position, base: Head) -> bool:
    """The same when members load their disk head first (rules L5, R4)."""
    return holds(position, base) or position.disk_head == base


def choose_restart_base(positions: Iterable[Position]) -> Head | None:
    """The newest head that anybody has in memory or on disk (rules L5, R3); None if there is none.

    Heads of step 0 differ in their digests: the one of the first position wins, so give them in stable order.
    """
    heads: list[Head] = []
    for position in positions:
        if position.level:
            heads.append(position.head)
        if position.disk_head is not None:
            heads.append(position.disk_head)
    return max(heads, key=lambda h: h.order, default=None)
