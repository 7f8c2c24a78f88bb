"""A small world around the quorum core: members that follow rules M1-M7, streams that break, crashes, a store.

Every promise is checked when something happens; a broken one raises AssertionError.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lighthouse.core.base import holds
from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import (
    Close,
    Connected,
    CoreConfig,
    Disconnected,
    Effect,
    Event,
    ExitSeen,
    Ponged,
    Received,
    Record,
    Resumed,
    Send,
    SendPing,
    Store,
)
from lighthouse.messages import (
    Ask,
    Beat,
    Down,
    Fault,
    Form,
    Head,
    Hello,
    Position,
    Process,
    Progress,
    Quorum,
    Retired,
    Revoke,
    Vote,
)

Key = tuple[int, int]
"""Step and quorum id."""


def initial_head(name: str) -> Head:
    """Replica c was started from another seed."""
    return Head(0, 0, "d1" if name == "c" else "d0")


@dataclass(eq=False)
class Node:
    """One process of a replica group; its whole group is one thread here."""

    who: Process
    head: Head
    disk_head: Head | None
    alive: bool = True
    session: int = 0
    connected: bool = False
    floor: int = 0
    level: bool = True
    voted: Vote | None = None
    quorum: Quorum | None = None
    asked: bool = False
    leaving: bool = False
    change_wanted: bool = False
    counter: int = 0
    up: dict[int, deque[Event]] = field(default_factory=dict[int, deque[Event]])
    """In flight to the Lighthouse, a queue for each session: streams may overtake one another."""
    down: deque[Down | str] = field(default_factory=deque[Down | str])

    def position(self) -> Position:
        progress = Progress(self.head.step, "compute", self.counter)
        return Position(self.floor, self.head, self.voted, self.level, self.disk_head, progress)

    def in_force(self) -> bool:
        return self.alive and self.quorum is not None and self.quorum.id > self.floor


class World:
    """Lighthouse, members, and what they have committed."""

    def __init__(self, names: str, min_replicas: int) -> None:
        self.config = CoreConfig(
            min_replicas=min_replicas, expected_replicas=len(names), restart_timeout_ms=2_000
        )
        self.now_ms = 0
        self.clock_seconds = 1_000.0
        self.record: Record | None = None
        self.nodes: list[Node] = []
        self.disks: dict[str, Head] = {}
        self.incarnations = 0
        self.posted: dict[Key, dict[Process, Head | None]] = {}
        self.votes: dict[Key, set[Process]] = {}
        self.generation = 0
        self.quorums: dict[int, Quorum] = {}
        self.generation_of: dict[int, int] = {}
        self.predecessor: dict[int, int] = {}
        self.committed: dict[tuple[int, int], Head] = {}
        self.parents: dict[Head, Head] = {}
        self.effects_until_crash: int | None = None
        self._boot(None)
        for name in names:
            self.start(name)

    # --- Lighthouse -----------------------------------------------------------------------------------------

    def _boot(self, record: Record | None) -> None:
        self.record = record
        self.core = QuorumCore(self.config, record, self.clock_seconds, self.now_ms)
        self.carry_out(self.core.start())

    def restart_lighthouse(self, keep_store: bool) -> None:
        for node in self.nodes:
            self.break_stream(node, keep=False)
            node.up.clear()
        self.clock_seconds += 0.1
        self.effects_until_crash = None
        self._boot(self.record if keep_store else None)
        if self.record is None or self.record.q_last is None:
            # Left over by design: a Lighthouse that knows nothing must not see newcomers or old members only.
            for node in self.nodes:
                if node.alive and node.quorum is not None:
                    self.connect(node)
                    self.deliver_up(node, node.session)

    def handle(self, event: Event) -> None:
        self.carry_out(self.core.handle(event, self.now_ms))

    def tick(self, ms: int) -> None:
        self.now_ms += ms
        self.carry_out(self.core.tick(self.now_ms))

    def carry_out(self, effects: list[Effect]) -> None:
        self.core.validate()
        for effect in effects:
            if self.effects_until_crash is not None:
                self.effects_until_crash -= 1
                if self.effects_until_crash < 0:
                    self.restart_lighthouse(keep_store=True)
                    return
            match effect:
                case Store():
                    assert effect.expected_epoch == (self.record.epoch if self.record else None)
                    self._stored(effect.record)
                case Send():
                    node = self.node_on(effect.process, effect.session)
                    if node is not None:
                        node.down.append(effect.message)
                case SendPing():
                    node = self.node_on(effect.process, effect.session)
                    if node is not None:
                        node.down.append("ping")
                case Close():
                    node = self.node_on(effect.process, effect.session)
                    if node is not None:
                        node.down.append("close")
                case _:
                    pass

    def _stored(self, record: Record) -> None:
        previous, self.record = self.record, record
        quorum = record.q_last
        if quorum is not None and quorum.id in self.quorums:
            self._back_to(quorum)
        if quorum is None or quorum.id in self.quorums:
            return
        assert all(quorum.id > other for other in self.quorums), "ids grow for ever"
        assert len(quorum.members) >= self.config.min_replicas
        before = previous.q_last if previous is not None else None
        if quorum.reload or before is None:
            self.generation += 1
        self.quorums[quorum.id] = quorum
        self.generation_of[quorum.id] = self.generation
        self.predecessor[quorum.id] = before.id if before is not None else 0
        assert any(m.contributor for m in quorum.members), "somebody holds the base"

    def _back_to(self, quorum: Quorum) -> None:
        """A lost store and no living member of the newest quorums: a total loss that is announced (R2)."""
        alive = [n for n in self.nodes if n.alive]
        assert all(n.quorum is None or n.quorum.id <= quorum.id for n in alive), "the newest report counts"
        if quorum.id < max(self.quorums):
            self.generation = self.generation_of[quorum.id]
            step = max((n.head.step for n in alive if quorum.rank_of(n.who) is not None), default=0)
            self.committed = {k: head for k, head in self.committed.items() if head.step <= step}

    def node_on(self, who: Process, session: int) -> Node | None:
        for node in self.nodes:
            if node.who == who and node.connected and node.session == session:
                return node
        return None

    # --- streams --------------------------------------------------------------------------------------------

    def connect(self, node: Node) -> None:
        if not node.alive or node.connected:
            return
        node.session += 1
        node.connected = True
        hello = Hello(node.position(), "host:1", 1, node.quorum)
        node.up[node.session] = deque([Connected(node.who, node.session, hello)])
        if node.asked:
            self.send(node, Ask(node.position(), node.leaving))

    def send(self, node: Node, message: Ask | Beat | Fault) -> None:
        if node.connected:
            node.up[node.session].append(Received(node.who, node.session, message))

    def break_stream(self, node: Node, keep: bool) -> None:
        """The stream ends; with ``keep``, what was in flight to the Lighthouse still arrives."""
        if not node.connected:
            return
        node.connected = False
        node.down.clear()
        queue = node.up[node.session]
        if not keep:
            opened = not any(isinstance(e, Connected) for e in queue)
            queue.clear()
            if not opened:
                return
        queue.append(Disconnected(node.who, node.session))

    def deliver_up(self, node: Node, session: int) -> None:
        queue = node.up.get(session)
        if queue:
            event = queue.popleft()
            if not queue and not (node.connected and session == node.session):
                del node.up[session]
            self.handle(event)

    def deliver_down(self, node: Node) -> None:
        if not node.down:
            return
        match node.down.popleft():
            case "ping":
                node.up[node.session].append(Ponged(node.who, node.session))
            case "close":
                self.break_stream(node, keep=False)
            case Form() as form:
                self._adopt(node, form.quorum)
            case Revoke() as revoke:
                self._revoked(node, revoke)
            case Retired():
                self._die(node)
            case _:
                pass

    # --- life -------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.incarnations += 1
        disk = self.disks.get(name)
        node = Node(Process(name, str(self.incarnations)), disk or initial_head(name), disk, asked=True)
        self.nodes.append(node)
        self.connect(node)

    def crash(self, node: Node, seen: bool) -> None:
        self._die(node)
        if seen:
            self.handle(ExitSeen(node.who))

    def _die(self, node: Node) -> None:
        node.alive = False
        self.break_stream(node, keep=True)

    def report_exit(self, node: Node, by_name: bool) -> None:
        """A launcher reports late; an operator vouches for a replica of which nothing lives."""
        replica_id = node.who.replica_id
        if by_name and not any(n.alive for n in self.nodes if n.who.replica_id == replica_id):
            self.handle(ExitSeen(Process(replica_id, "")))
        elif not node.alive:
            self.handle(ExitSeen(node.who))

    def stand_still(self, still: Node) -> None:
        """The training of one does nothing for a minute while its control thread beats and the others wait."""
        for _ in range(13):
            for node in self.nodes:
                phase = "compute" if node is still else "reduce"
                self.send(node, Beat(Progress(node.head.step, phase, node.counter)))
                while node.up.get(node.session):
                    self.deliver_up(node, node.session)
            self.tick(4_900)

    def pause_lighthouse(self) -> None:
        """It was frozen: its running clock stood still, streams broke meanwhile, and it is told so first (F22)."""
        self.handle(Resumed())

    def leave(self, node: Node) -> None:
        node.leaving = True
        self._fence(node, node.quorum.id if node.quorum is not None else 0)

    # --- members: M1-M7 ----------------------------------------------------------------------------------------

    def _fence(self, node: Node, quorum_id: int) -> None:
        node.floor = max(node.floor, quorum_id)
        node.asked = True
        self.send(node, Ask(node.position(), node.leaving))

    def _revoked(self, node: Node, revoke: Revoke) -> None:
        idle = node.quorum is None or node.quorum.id != revoke.quorum_id
        if revoke.quorum_id <= node.floor:
            if not node.in_force():
                self._fence(node, 0)
        elif revoke.now or idle:
            self._fence(node, revoke.quorum_id)
        else:
            node.change_wanted = True

    def _adopt(self, node: Node, quorum: Quorum) -> None:
        adopted = node.quorum.id if node.quorum is not None else 0
        if quorum.rank_of(node.who) is None or quorum.id <= max(node.floor, adopted):
            return
        was_level, base = node.level, quorum.base
        survivor = node.quorum is not None and self.predecessor[quorum.id] == adopted and not quorum.reload
        if quorum.reload and not holds(node.position(), base):
            node.head, node.level, node.voted = (
                node.disk_head or initial_head(node.who.replica_id),
                True,
                None,
            )
        if node.head == base:
            pass
        elif node.voted == Vote(base.step, base.quorum_id):
            self._commit(node, base)
        else:
            assert not (survivor and was_level), "no survivor loses a step that it computed (P3)"
            node.head, node.level = base, False
        rank = quorum.rank_of(node.who)
        assert rank is not None
        assert node.level or not quorum.members[rank].contributor, (
            f"a contributor holds the base: {node} {quorum}"
        )
        node.voted, node.quorum, node.asked, node.change_wanted = None, quorum, False, node.leaving

    def fail(self, node: Node, peer: str | None) -> None:
        if node.in_force():
            assert node.quorum is not None
            self.send(node, Fault(node.quorum.id, peer, "broken"))
            self._fence(node, node.quorum.id)

    def post(self, node: Node) -> None:
        if node.in_force() and node.voted is None:
            node.counter += 1
            key = self._key(node)
            self.posted.setdefault(key, {})[node.who] = node.head if node.level else None

    def vote(self, node: Node) -> None:
        if not node.in_force() or node.voted is not None or not self._complete(node, self.posted):
            return
        key = self._key(node)
        heads = {head for head in self.posted[key].values() if head is not None}
        assert len(heads) <= 1, "gradients of different parameters are never averaged (P1)"
        if not heads:
            return
        node.voted = Vote(*key)
        self.votes.setdefault(key, set()).add(node.who)

    def commit(self, node: Node) -> None:
        if not node.in_force() or node.voted is None or not self._complete(node, self.votes):
            return
        assert node.quorum is not None
        generation, key = self.generation_of[node.quorum.id], (node.voted.step, node.voted.quorum_id)
        if generation != self.generation:
            # Cut off, replaced by its launcher and not told yet: what it does is lost, as was announced.
            known = self.committed.get((generation, node.voted.step)) == Head(*key)
            assert known or all(self._gone(m.process) for m in node.quorum.members), "the loss was not total"
            return
        self._commit(node, Head(node.voted.step, node.voted.quorum_id))
        node.voted = None
        if node.change_wanted:
            self._fence(node, node.quorum.id)

    def heal(self, node: Node) -> None:
        """A joiner gets the state of its head from somebody who has it."""
        if node.alive and any(n.alive and n.level and n.head == node.head for n in self.nodes):
            node.level = True

    def save(self, node: Node) -> None:
        if node.alive and node.level:
            self.disks[node.who.replica_id] = node.disk_head = node.head

    def _gone(self, who: Process) -> bool:
        """Dead, or replaced by another process of its name."""
        same = [n for n in self.nodes if n.who.replica_id == who.replica_id]
        return any(n.who != who or not n.alive for n in same)

    def _key(self, node: Node) -> Key:
        assert node.quorum is not None
        return (node.head.step + 1, node.quorum.id)

    def _complete(
        self, node: Node, what: dict[Key, dict[Process, Head | None]] | dict[Key, set[Process]]
    ) -> bool:
        assert node.quorum is not None
        done = what.get(self._key(node), ())
        return all(member.process in done for member in node.quorum.members)

    def _commit(self, node: Node, head: Head) -> None:
        generation = self.generation_of[head.quorum_id]
        known = self.committed.setdefault((generation, head.step), head)
        assert known == head, f"one step, one quorum (P2): {known} and {head}"
        parent = self.parents.setdefault(head, node.head)
        assert parent == node.head, f"equal heads have equal histories (P1): {parent} and {node.head}"
        node.head = head

    # --- the calm at the end --------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        """Faults stop: whoever lives must be in one quorum soon, be level and commit a step together."""
        self.effects_until_crash = None
        for _ in range(2_000):
            for node in self.nodes:
                if not node.alive:
                    self.handle(ExitSeen(node.who))
            if all(n.leaving for n in self.nodes if n.alive):
                return
            if (
                len({n.who.replica_id for n in self.nodes if n.alive and not n.leaving})
                < self.config.min_replicas
            ):
                self.start(f"late{self.incarnations}x")
            self.exchange_all()
            self.tick(500)
            self.step_together()
            if self._settled():
                return
        alive = [
            f"{n.who} at {n.head} floor {n.floor} level {n.level} asked {n.asked}"
            for n in self.nodes
            if n.alive
        ]
        story = [str(self.core.view(self.now_ms).peers), *self.core.story()[-20:]]
        raise AssertionError("no liveness:\n" + "\n".join([*alive, *story]))

    def exchange_all(self) -> None:
        for node in self.nodes:
            self.connect(node)
            if node.alive:
                node.counter += 1
                self.send(node, Beat(node.position().progress))
        moved = True
        while moved:
            moved = False
            for node in self.nodes:
                for session in list(node.up):
                    while node.up.get(session):
                        self.deliver_up(node, session)
                        moved = True
                while node.down:
                    self.deliver_down(node)
                    moved = True

    def step_together(self) -> None:
        for act in (self.heal, self.post, self.vote, self.commit):
            for node in self.nodes:
                act(node)

    def _settled(self) -> bool:
        alive = [n for n in self.nodes if n.alive]
        if any(n.leaving for n in alive) and any(not n.leaving for n in alive):
            return False
        quorums = {n.quorum for n in alive}
        quorum = next(iter(quorums)) if len(quorums) == 1 else None
        if quorum is None:
            return not alive
        return (
            {m.process for m in quorum.members} == {n.who for n in alive}
            and all(n.in_force() and n.level and n.head.quorum_id == quorum.id for n in alive)
            and len({n.head for n in alive}) == 1
        )
