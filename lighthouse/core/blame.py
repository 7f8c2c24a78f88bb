"""Members that cannot work together (rule L8, protocol-rationale F25)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lighthouse.messages import Process, Quorum

MAX_DELAY_MS = 600_000
FRUITLESS_LIMIT = 2
EVERYBODY = ""
"""Left out in place of a replica_id when nobody can be spared: the next quorum waits."""


class Blame:
    """Counts quorums of the same members without a commit, and chooses who has to stay out, and for how long."""

    def __init__(self, first_delay_ms: int) -> None:
        self._first_delay_ms = first_delay_ms
        self._faults: Counter[tuple[str, str]] = Counter()
        self._counted: set[tuple[int, str, str]] = set()
        """Of the last two quorums: who named whom; each counts once a quorum."""
        self._members: frozenset[Process] = frozenset()
        self._fruitless = 0
        self._delay_ms: dict[str, int] = {}
        self._out_until_ms: dict[str, int] = {}

    def fault(self, quorum_id: int, reporter: str, peer: str) -> None:
        """``reporter`` names ``peer`` as the one it could not work with under ``quorum_id``."""
        if (quorum_id, reporter, peer) not in self._counted:
            self._counted.add((quorum_id, reporter, peer))
            self._faults[reporter, peer] += 1

    def quorum_ended(self, quorum: Quorum, committed: bool) -> None:
        """Take note of what became of a quorum, once, when the next one is formed."""
        members = frozenset(m.process for m in quorum.members)
        self._counted = {fault for fault in self._counted if fault[0] >= quorum.id}
        if committed:
            self._fruitless, self._members = 0, frozenset()
            self._faults.clear()
            for replica_id in (EVERYBODY, *(m.replica_id for m in members)):
                self._delay_ms.pop(replica_id, None)
        elif members == self._members:
            self._fruitless += 1
        else:
            self._fruitless, self._members = 1, members

    def must_leave_one_out(self, members: Sequence[Process]) -> bool:
        """True if these members have failed together twice (and nothing has been committed between)."""
        return self._fruitless >= FRUITLESS_LIMIT and self._members == frozenset(members)

    def most_blamed(self, members: Sequence[Process], candidates: Sequence[Process]) -> Process:
        """The candidate named most often by members; among equals one that also named who names it (both ends of a
        broken link do), then the last (order: oldest membership first)."""
        names = {m.replica_id for m in members}
        votes: Counter[str] = Counter()
        links: Counter[str] = Counter()
        for (reporter, peer), count in self._faults.items():
            if reporter in names:
                votes[peer] += count
                links[peer] += (peer, reporter) in self._faults
        order = {c: (votes[c.replica_id], links[c.replica_id]) for c in candidates}
        most = max(order.values())
        return [c for c in candidates if order[c] == most][-1]

    def leave_out(self, replica_id: str, now_ms: int) -> int:
        """Keep ``replica_id`` out for a time that doubles with every repetition; returns it in milliseconds."""
        delay_ms = min(2 * self._delay_ms.get(replica_id, self._first_delay_ms // 2), MAX_DELAY_MS)
        self._delay_ms[replica_id] = delay_ms
        self._out_until_ms[replica_id] = now_ms + delay_ms
        self._fruitless, self._members = 0, frozenset()
        return delay_ms

    def out_until_ms(self, replica_id: str) -> int:
        """Until when ``replica_id`` is left out; 0 if it is not."""
        return self._out_until_ms.get(replica_id, 0)

    def link(self, replica_id: str) -> str:
        """Who could not work with whom, for people."""
        counts = Counter({pair: n for pair, n in self._faults.items() if replica_id in pair})
        if not counts:
            return f"nobody was named by a fault, {replica_id} joined last"
        (reporter, peer), count = counts.most_common(1)[0]
        return (
            f"{reporter} named {peer} in {count} fault{'s' if count > 1 else ''}: check the link between them"
        )
