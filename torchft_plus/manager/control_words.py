"""Control words: what the members' blocks of one step add up to. Pure, and the same on every member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lighthouse.messages import Head
from torchft_plus.pb import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a step, known to every member that has all blocks (rules M1, M3)."""

    total_weight: float
    contributors: int
    skip: bool
    stale: bool
    change_wanted: bool
    scalars: dict[str, float]
    positions: dict[str, int]


def to_head(head: pb.PeerHead) -> Head:
    """Head from its wire form."""
    return Head(head.step, head.quorum_id, head.digest)


def from_head(head: Head) -> pb.PeerHead:
    """Wire form of a head."""
    return pb.PeerHead(step=head.step, quorum_id=head.quorum_id, digest=head.digest)


def same_head(a: Head, b: Head) -> bool:
    """Heads are equal as a whole; the digest counts at step 0 only, where nothing else tells states apart (F13)."""
    return (a.step, a.quorum_id) == (b.step, b.quorum_id) and (a.step > 0 or a.digest == b.digest)


def summarise(blocks: Sequence[pb.ControlBlock]) -> Summary:
    """Add up the blocks, given by replica rank. Sums run in rank order, so that their bits are equal everywhere.

    A step without weight, or with a non-finite contribution, is a *skip*: head and positions move, nothing is applied.
    """
    contributing = [block for block in blocks if block.weight > 0]
    scalars: dict[str, float] = {}
    positions: dict[str, int] = {}
    for block in contributing:
        for name in sorted(block.scalars):
            scalars[name] = scalars.get(name, 0.0) + block.scalars[name]
        positions.update(block.positions)
    return Summary(
        total_weight=sum(block.weight for block in contributing),
        contributors=len(contributing),
        skip=not contributing or any(not block.finite for block in contributing),
        stale=any(block.stale for block in blocks),
        change_wanted=any(block.change_wanted for block in blocks),
        scalars=scalars,
        positions=positions,
    )


def wrong_head(blocks: Sequence[pb.ControlBlock], head: Head) -> int | None:
    """Replica rank of the first contributor whose gradient was computed at another head than ``head``, or None."""
    for rank, block in enumerate(blocks):
        if block.weight > 0 and not same_head(to_head(block.head), head):
            return rank
    return None


def merge_scalars(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum the scalars of a group's ranks, in rank order."""
    total: dict[str, float] = {}
    for part in parts:
        for name in sorted(part):
            total[name] = total.get(name, 0.0) + part[name]
    return total
