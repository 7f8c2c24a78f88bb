"""Who is there: sessions, incarnations, silence, loss (rules L6, L7). Time is an argument."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lighthouse.core.words import Close, CoreConfig, Effect, Note, Send, SendPing
from lighthouse.messages import (
    WAITING_PHASES,
    Ask,
    Hello,
    Position,
    Process,
    Progress,
    Quorum,
    Retired,
)

MAX_REMEMBERED = 4096
LEFT = "it left in good order"
"""Why a process is gone that had asked to leave."""


@dataclass(slots=True, eq=False)
class Peer:
    """The one accepted process of a replica_id."""

    process: Process
    address: str
    session: int = -1
    connected: bool = False
    heard_ms: int = 0
    """When the last word came; while disconnected, when the stream broke."""
    lost: str | None = None
    """Why it counts as lost, until it is back."""
    named: bool = False
    """A fault of the quorum in force names it: no grace if its stream is broken."""
    held: bool = False
    """It is out of sight since nobody was heard: that may be the Lighthouse's own trouble (rule L6)."""
    back_by_ms: int | None = None
    """Until when it may come back after nobody was heard, or after a stream that it gave up; given once, until it answers."""
    position: Position | None = None
    ask: Ask | None = None
    """The ask that stands on the current session."""
    asked_ms: int = 0
    had_quorum: bool = False
    """This process was in a quorum: its asks need the echo of the last id (rule L3)."""
    moved_ms: int = 0
    waiting_since_ms: int | None = None
    overdue: bool = False
    answering: bool = False
    """It said on the current session what only follows an answer: a try that it gave up is no news about itself."""
    greeted: bool = False
    """Its hello was answered with what it lacks (the last quorum or a revocation)."""
    revoked: tuple[int, bool] = (0, False)
    """What was last revoked on this session: id, now."""
    adopted: Quorum | None = None
    """The quorum that it had adopted when it said hello."""

    @property
    def replica_id(self) -> str:
        """Stable name."""
        return self.process.replica_id

    def floor(self) -> int:
        """The id below or at which it will never act again."""
        return self.position.floor if self.position is not None else 0


@dataclass(slots=True)
class Pending:
    """A new incarnation that has to wait until it is known whether the old one lives."""

    process: Process
    session: int
    hello: Hello
    ask: Ask | None = None
    answering: bool = False
    """As that of a peer."""
    ping_ms: int | None = None
    """When the old one was pinged; None: it is given time to reconnect."""


@dataclass(slots=True)
class Wakeups:
    """Collects the times at which something can become due."""

    now_ms: int = 0
    next_ms: int | None = None

    def due(self, at_ms: int) -> bool:
        """True if ``at_ms`` has come; if not, wake up then."""
        if self.now_ms >= at_ms:
            return True
        if self.next_ms is None or at_ms < self.next_ms:
            self.next_ms = at_ms
        return False


@dataclass(slots=True)
class Roster:
    """All processes of one job. Effects are appended to ``effects``, which the core hands out."""

    config: CoreConfig
    effects: list[Effect]
    wakeups: Wakeups
    window_until_ms: int = 0
    """Until then a process that is not there may be reconnecting (the Lighthouse was paused)."""
    peers: dict[str, Peer] = field(default_factory=dict[str, Peer])
    pending: dict[str, Pending] = field(default_factory=dict[str, Pending])
    gone: dict[Process, str] = field(default_factory=dict[Process, str])
    """Processes that will never act again, and why."""
    q_last: Quorum | None = None
    """The last quorum formed; set by ``set_last``."""
    ranks: dict[Process, int] = field(default_factory=dict[Process, int])
    """Replica rank of each member of ``q_last``."""
    word_ms: int = 0
    """When the last word of any member of ``q_last`` came."""

    # --- looking up -----------------------------------------------------------------------------------------

    def peer(self, process: Process) -> Peer | None:
        """The peer of exactly this incarnation."""
        peer = self.peers.get(process.replica_id)
        return peer if peer is not None and peer.process == process else None

    def on_session(self, process: Process, session: int) -> Peer | None:
        """The peer if this is its current session; words of older ones are ignored."""
        peer = self.peer(process)
        return peer if peer is not None and peer.connected and peer.session == session else None

    def set_last(self, quorum: Quorum) -> None:
        """``quorum`` is the last one from now on."""
        self.q_last = quorum
        self.ranks = {member.process: rank for rank, member in enumerate(quorum.members)}
        self.word_ms = max((p.heard_ms for _, p in self.members(quorum) if p), default=self.wakeups.now_ms)

    def run_has_ended(self) -> bool:
        """True if every member of the last quorum has left in good order."""
        return self.q_last is not None and all(self.gone.get(process) == LEFT for process in self.ranks)

    def is_member(self, peer: Peer) -> bool:
        """True if ``peer`` is in the last quorum."""
        return peer.process in self.ranks

    def counts(self, peer: Peer) -> bool:
        """Rule L3: the ask stands on the current session and gives up the last quorum."""
        if peer.ask is None:
            return False
        if self.q_last is None or peer.floor() >= self.q_last.id:
            return True
        return not peer.had_quorum and not self.is_member(peer)

    def members(self, quorum: Quorum | None) -> Iterator[tuple[Process, Peer | None]]:
        """Each member of ``quorum`` with its peer, if it is known."""
        if quorum is not None:
            for member in quorum.members:
                yield member.process, self.peer(member.process)

    # --- coming -----------------------------------------------------------------------------------------------

    def expect(self, quorum: Quorum) -> None:
        """Members of ``quorum`` that were not met yet get the time to reconnect."""
        for member in quorum.members:
            process = member.process
            if process not in self.gone and process.replica_id not in self.peers:
                peer = Peer(process, member.address, heard_ms=self.wakeups.now_ms, had_quorum=True)
                self.peers[process.replica_id] = peer

    def hello(self, process: Process, session: int, hello: Hello) -> Peer | None:
        """A stream was opened. Returns the peer if it is accepted now (rule L7)."""
        if process in self.gone:
            self._turn_away(process, session, self.gone[process])
            return None
        current = self.peers.get(process.replica_id)
        if current is None or current.process == process:
            return self._accept(process, session, hello)
        return self._meet_other_incarnation(current, Pending(process, session, hello))

    def has_orphans(self) -> bool:
        """True if a new incarnation waits for an old one that is not there any more."""
        return any(replica_id not in self.peers for replica_id in self.pending)

    def resolve_pending(self) -> list[tuple[Peer, Ask | None]]:
        """Accept new incarnations whose predecessors have turned out to be gone, with the asks they made."""
        accepted: list[tuple[Peer, Ask | None]] = []
        for pending in list(self.pending.values()):
            peer = self._resolve(pending)
            if peer is not None:
                accepted.append((peer, pending.ask))
        return accepted

    def ponged(self, process: Process, session: int) -> None:
        """The old incarnation lives: the new one is a duplicate."""
        peer = self.on_session(process, session)
        pending = self.pending.get(process.replica_id)
        if peer is None:
            return
        self.answers(peer)
        self.hear(peer)
        if pending is not None and pending.ping_ms is not None:
            del self.pending[process.replica_id]
            reason = (
                f"replica_id {process.replica_id!r} is in use by the running process {process}: "
                "give every group its own replica_id, or end the other process first"
            )
            self._turn_away(pending.process, pending.session, reason)

    def _accept(self, process: Process, session: int, hello: Hello) -> Peer | None:
        peer = self.peers.get(process.replica_id)
        if peer is None:
            peer = Peer(process, hello.address, moved_ms=self.wakeups.now_ms)
            self.peers[process.replica_id] = peer
        elif session <= peer.session:
            self.effects.append(Close(process, session, "a newer session of this process is open"))
            return None
        elif peer.connected:
            self.effects.append(Close(process, peer.session, "the process opened a newer session"))
        newcomer = self.pending.get(process.replica_id)
        if newcomer is not None and newcomer.process != process:
            newcomer.ping_ms = None  # a ping was lost with the old session
        peer.session, peer.address = session, hello.address
        peer.connected, peer.lost = True, None
        peer.ask, peer.greeted, peer.revoked = None, False, (0, False)
        peer.answering = False
        peer.adopted = hello.quorum
        peer.had_quorum |= hello.quorum is not None or hello.position.floor > 0
        self.heard(peer, hello.position)
        fields = {"replica_id": process.replica_id, "incarnation": process.incarnation}
        self.effects.append(Note(f"{process} connected (session {session})", "connected", fields))
        return peer

    def _has_replaced(self, new: Pending, current: Peer) -> bool:
        """True if ``new`` is in a later quorum than ``current``: an earlier Lighthouse had taken its hello.

        A Lighthouse that lost its store meets both in any order, if the replaced one was frozen and not dead.
        """
        quorum = new.hello.quorum
        if quorum is None or quorum.rank_of(new.process) is None:
            return False
        known = [q for q in (current.adopted, self.q_last) if q and q.rank_of(current.process) is not None]
        return all(quorum.id > other.id for other in known)

    def _meet_other_incarnation(self, current: Peer, new: Pending) -> Peer | None:
        older = self.pending.get(new.process.replica_id)
        if self._has_replaced(new, current):
            if older is not None and older.process == new.process:
                del self.pending[new.process.replica_id]
            self.retire(current.process, f"it was replaced by {new.process}")
            return self._accept(new.process, new.session, new.hello)
        if older is not None and older.process != new.process:
            reason = (
                f"another new process of replica_id {current.replica_id!r} is already waiting for its place"
            )
            self._turn_away(new.process, new.session, reason)
            return None
        if older is not None and new.session <= older.session:
            self.effects.append(Close(new.process, new.session, "a newer session of this process is open"))
            return None
        new.ping_ms = older.ping_ms if older is not None else None
        self.pending[new.process.replica_id] = new
        peer = self._resolve(new)
        if peer is None:
            self.effects.append(Note(f"{new.process} waits: is its predecessor {current.process} alive?"))
        return peer

    def _resolve(self, pending: Pending) -> Peer | None:
        current = self.peers.get(pending.process.replica_id)
        if current is not None and current.connected:
            if pending.ping_ms is None:
                pending.ping_ms = self.wakeups.now_ms
                self.effects.append(SendPing(current.process, current.session))
            limit_ms = self.config.timeouts.heartbeat_timeout_ms
            if not self.wakeups.due(pending.ping_ms + limit_ms):
                return None
        elif current is not None and current.lost is None:
            if current.held:
                self._excuse(
                    current
                )  # the newcomer is no word of the old one, and yet does not wait for ever
            return None  # until its time to reconnect is over
        if current is not None:
            self.retire(current.process, f"it was replaced by {pending.process}")
        self.pending.pop(pending.process.replica_id, None)
        peer = self._accept(pending.process, pending.session, pending.hello)
        if peer is not None and pending.answering:
            self.answers(peer)
        return peer

    # --- speaking ---------------------------------------------------------------------------------------------

    def hear(self, peer: Peer) -> None:
        """A word came from ``peer``. The first one after nobody was heard excuses the other members once."""
        if self.is_member(peer):
            if self._hears_nobody():
                for _, other in self.members(self.q_last):
                    if other is not None and other.lost is None:
                        self._excuse(other)
            self.word_ms = self.wakeups.now_ms
        peer.heard_ms, peer.held = self.wakeups.now_ms, False
        if peer.answering:
            peer.back_by_ms = None

    def answers(self, peer: Peer) -> None:
        """``peer`` said what only follows an answer: it is at the other end of its current stream, and means to stay."""
        if not peer.answering:
            peer.answering, peer.named = True, False

    def _excuse(self, peer: Peer) -> None:
        """Give ``peer`` the time to come back, unless it had that already."""
        if peer.back_by_ms is None:
            peer.back_by_ms = self.wakeups.now_ms + self.config.restart_grace_ms
        self.wakeups.due(peer.back_by_ms)

    def _hears_nobody(self) -> bool:
        """True if no member was heard for so long that the Lighthouse itself may be cut off.

        Members that live are heard five times within the limit, so that the words that were due before a cut, and
        some delay, do not hide it.
        """
        return self.wakeups.now_ms - self.word_ms >= self._enough_silence_ms()

    def _enough_silence_ms(self) -> int:
        timeouts = self.config.timeouts
        return max(
            timeouts.heartbeat_timeout_ms - 2 * timeouts.heartbeat_interval_ms,
            timeouts.heartbeat_timeout_ms // 2,
        )

    def _hears_strangers(self) -> bool:
        """True if somebody new asks and is heard, and need not wait for members that may live: this Lighthouse is not
        cut off."""
        if not self.config.lost_is_gone:
            return False
        since_ms = self.wakeups.now_ms - self._enough_silence_ms()
        asks = (peer for peer in self.peers.values() if peer.connected and peer.ask is not None)
        return any(not self.is_member(peer) and peer.heard_ms > since_ms for peer in asks)

    def heard(self, peer: Peer, position: Position) -> None:
        """A whole position came from ``peer``."""
        previous = peer.position
        if previous is not None and position.progress.counter < previous.progress.counter:
            position = replace(
                position, progress=previous.progress
            )  # an ask may say an older one than a heartbeat
        peer.position = position
        self._progress(peer, previous.progress if previous is not None else None, position.progress)

    def beat(self, peer: Peer, progress: Progress) -> bool:
        """A heartbeat came; True if it changes who is awaited now, and not only when somebody will be overdue."""
        self.answers(peer)
        if peer.position is None:
            return False
        previous = peer.position.progress
        if previous != progress:
            position = peer.position
            peer.position = Position(
                position.floor, position.head, position.voted, position.level, position.disk_head, progress
            )
        was_overdue = peer.overdue
        self._progress(peer, previous, progress)
        if previous.phase != progress.phase:
            self.wakeups.due(self.wakeups.now_ms + self.config.timeouts.timeout_ms)
        return was_overdue != peer.overdue

    def _progress(self, peer: Peer, previous: Progress | None, progress: Progress) -> None:
        now_ms = self.wakeups.now_ms
        self.hear(peer)
        moved = previous is None or previous.counter != progress.counter
        if moved:
            peer.moved_ms = now_ms
            if peer.overdue:
                peer.overdue = False
                self.effects.append(Note(f"{peer.process} moves again and may take part"))
        if progress.phase not in WAITING_PHASES:
            peer.waiting_since_ms = None
        elif moved or peer.waiting_since_ms is None:
            peer.waiting_since_ms = now_ms

    def resumed(self) -> None:
        """This Lighthouse was paused: what its peers said meanwhile is still to be read (F22)."""
        self.window_until_ms = self.wakeups.now_ms + self.config.restart_grace_ms
        self.word_ms = self.wakeups.now_ms
        for peer in self.peers.values():
            if peer.connected:
                peer.heard_ms = self.wakeups.now_ms
        for pending in self.pending.values():
            if pending.ping_ms is not None:
                pending.ping_ms = self.wakeups.now_ms

    # --- going ------------------------------------------------------------------------------------------------

    def disconnected(self, process: Process, session: int) -> None:
        """A stream broke."""
        pending = self.pending.get(process.replica_id)
        if pending is not None and (pending.process, pending.session) == (process, session):
            del self.pending[process.replica_id]
        peer = self.on_session(process, session)
        if peer is None:
            return
        peer.connected, peer.ask = False, None
        if self.is_member(peer) and self._hears_nobody():
            peer.held = True  # it ended a stream on which it heard nothing, which is no news about itself
        elif not peer.answering:
            self._excuse(peer)  # nor is a connection that came about when it had given up waiting for it
        else:
            peer.heard_ms = self.wakeups.now_ms

    def retire(self, process: Process, reason: str, *, left: bool = False) -> None:
        """``process`` will never act again."""
        self.gone[process] = reason
        while len(self.gone) > MAX_REMEMBERED:
            del self.gone[next(iter(self.gone))]
        pending = self.pending.get(process.replica_id)
        if pending is not None and pending.process == process:
            del self.pending[process.replica_id]
            self._turn_away(process, pending.session, reason)
        peer = self.peer(process)
        if peer is None:
            return
        del self.peers[process.replica_id]
        if peer.connected:
            self.effects.append(Send(process, peer.session, Retired(reason, left)))
            self.effects.append(Close(process, peer.session, reason))
        if peer.lost is None:
            self._note_lost(process, reason)

    def find_lost(self) -> None:
        """Mark who has become silent, and whose stream did not come back (rule L6)."""
        limit_ms = self.config.timeouts.heartbeat_timeout_ms
        deaf = self._hears_nobody() and all(peer and not peer.lost for _, peer in self.members(self.q_last))
        deaf = deaf and not self._hears_strangers()
        for peer in self.peers.values():
            if peer.connected and self.wakeups.due(peer.heard_ms + limit_ms + 1):
                self._judge_silent(peer, deaf, f"silent for more than {limit_ms} ms")
            elif not peer.connected and peer.lost is None:
                self._judge_broken(peer)

    def _judge_silent(self, peer: Peer, deaf: bool, reason: str) -> None:
        """Its stream is worth nothing any more; it is lost, unless no other member is heard either (``deaf``)."""
        peer.connected, peer.ask = False, None
        self.effects.append(Close(peer.process, peer.session, reason))
        if deaf and peer.back_by_ms is None and self.is_member(peer):
            peer.held = True
            text = f"{peer.process} is {reason}, and so are all others: is this Lighthouse cut off?"
            self.effects.append(Note(text))
        if peer.held or peer.back_by_ms is not None:
            self._judge_broken(peer)
        else:
            self._lose(peer, reason)

    def _may_reconnect(self, peer: Peer) -> bool:
        """True while a start or a pause of the Lighthouse, and not its own death, may be why it is not there."""
        if peer.session < 0:
            return not self.wakeups.due(
                max(peer.heard_ms + self.config.restart_grace_ms, self.window_until_ms)
            )
        return not self.wakeups.due(self.window_until_ms)

    def _judge_broken(self, peer: Peer) -> None:
        broken_ms = self.wakeups.now_ms - peer.heard_ms
        if peer.named:
            self._lose(peer, "its stream is broken and a fault names it")
        elif peer.back_by_ms is not None:
            if self.wakeups.due(max(peer.back_by_ms, self.window_until_ms)):
                self._lose(peer, f"silent, and not back within {self.config.restart_grace_ms} ms")
        elif peer.held:
            if self._hears_strangers() or self.wakeups.due(peer.heard_ms + self.config.certainly_gone_ms):
                self._lose(peer, f"silent for {broken_ms} ms, as all others are")
        elif self._may_reconnect(peer):
            return
        elif peer.session < 0:
            self._lose(peer, f"it did not reconnect within {broken_ms} ms")
        elif self.wakeups.due(peer.heard_ms + self.config.reconnect_grace_ms):
            self._lose(peer, f"its stream is broken for {broken_ms} ms")

    def _lose(self, peer: Peer, reason: str) -> None:
        peer.lost, peer.held = reason, False
        self._note_lost(peer.process, reason)

    def find_overdue(self) -> None:
        """Mark those for whom others wait while their training stands still (rule L6, F26)."""
        there = [p for p in self.peers.values() if p.connected and (self.is_member(p) or p.ask is not None)]
        waiting = [p.waiting_since_ms for p in there if p.waiting_since_ms is not None]
        if not waiting:
            return
        since_ms, limit_ms = min(waiting), self.config.timeouts.timeout_ms
        for peer in there:
            if peer.overdue or peer.waiting_since_ms is not None:
                continue
            if self.wakeups.due(max(peer.moved_ms, since_ms) + limit_ms):
                peer.overdue = True
                step = peer.position.progress.step if peer.position is not None else 0
                self._note_lost(
                    peer.process,
                    f"overdue: others wait, and it stands still at step {step} for {limit_ms} ms",
                )

    def forget_strangers(self, wanted: set[Process]) -> None:
        """Drop lost processes on which nothing depends; ``wanted`` stay, and members of the last quorum."""
        strangers = [
            replica_id
            for replica_id, peer in self.peers.items()
            if peer.lost is not None and not self.is_member(peer) and peer.process not in wanted
        ]
        for replica_id in strangers:
            del self.peers[replica_id]

    def _note_lost(self, process: Process, reason: str) -> None:
        fields = {"replica_id": process.replica_id, "incarnation": process.incarnation, "reason": reason}
        self.effects.append(Note(f"{process} is out: {reason}", "lost", fields))

    def _turn_away(self, process: Process, session: int, reason: str) -> None:
        self.effects.append(Send(process, session, Retired(reason)))
        self.effects.append(Close(process, session, reason))
        self.effects.append(Note(f"{process} was turned away: {reason}"))
