"""Drives a quorum core by hand: members by name, time by milliseconds, words as they were sent."""

from __future__ import annotations

from collections import defaultdict

from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import (
    Close,
    Connected,
    CoreConfig,
    Disconnected,
    Effect,
    Event,
    ExitSeen,
    Note,
    Ponged,
    Received,
    Record,
    Resumed,
    Send,
    SendPing,
    Store,
)
from lighthouse.messages import (
    Announce,
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

START = Head(0, 0, "d0")
CLOCK_SECONDS = 1_000
BEAT_MS = 500


class Driver:
    """A Lighthouse of one job. Names are replica_ids; "a2" is the second incarnation of "a"."""

    def __init__(
        self, record: Record | None = None, clock_seconds: float = CLOCK_SECONDS, **config: int
    ) -> None:
        self.now_ms = 0
        self.config = CoreConfig(**config)  # type: ignore[arg-type]
        self.record = record
        self.core = QuorumCore(self.config, record, clock_seconds, 0)
        self.inbox: dict[Process, list[Down]] = defaultdict(list)
        self.pings: list[Process] = []
        self.closed: list[tuple[Process, int]] = []
        self.sessions: dict[Process, int] = defaultdict(int)
        self.steps: dict[Process, int] = defaultdict(int)
        """What heartbeats say."""
        self.quorums: list[Quorum] = []
        self._carry_out(self.core.start())

    # --- what happens -------------------------------------------------------------------------------------

    def connect(
        self, name: str, quorum: Quorum | None = None, position: Position | None = None, session: int = 0
    ) -> None:
        """It opens a stream and hears the answer."""
        self.try_to_connect(name, quorum, position, session)
        self.beat(name, counter=0)

    def try_to_connect(
        self, name: str, quorum: Quorum | None = None, position: Position | None = None, session: int = 0
    ) -> None:
        who = process(name)
        self.sessions[who] = session or self.sessions[who] + 1
        hello = Hello(position or Position(0, START, level=True), "host:1", 1, quorum)
        self.event(Connected(who, self.sessions[who], hello))

    def ask(self, name: str, position: Position | None = None, leaving: bool = False) -> None:
        self.up(name, Ask(position or Position(0, START, level=True), leaving))

    def up(self, name: str, message: Ask | Beat | Fault) -> None:
        who = process(name)
        self.event(Received(who, self.sessions[who], message))

    def beat(self, name: str, counter: int, phase: str = "compute") -> None:
        self.up(name, Beat(Progress(self.steps[process(name)], phase, counter)))

    def fault(self, name: str, peer: str | None = None) -> None:
        self.up(name, Fault(self.quorum.id, peer, "broken"))

    def disconnect(self, name: str) -> None:
        who = process(name)
        self.event(Disconnected(who, self.sessions[who]))

    def exit_seen(self, name: str) -> None:
        self.event(ExitSeen(process(name)))

    def pong(self, name: str) -> None:
        self.event(Ponged(process(name), self.sessions[process(name)]))

    def resume(self) -> None:
        self.event(Resumed())

    def wait(self, ms: int, beats: str = "") -> None:
        """Let time pass; the members named in ``beats`` are heard all the while."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            due_ms = self.core.deadline()
            due_ms = end_ms if due_ms is None else due_ms
            due_ms = min(due_ms, self.now_ms + BEAT_MS) if beats else due_ms
            self.now_ms = min(end_ms, max(self.now_ms + 1, due_ms))
            for name in beats.split():
                self.beat(name, counter=7)
            self._carry_out(self.core.tick(self.now_ms))

    def event(self, event: Event) -> None:
        self._carry_out(self.core.handle(event, self.now_ms))

    # --- short forms ----------------------------------------------------------------------------------------

    def form(self, names: str) -> Quorum:
        """The first quorum, of these."""
        for name in names.split():
            self.connect(name)
        for name in names.split():
            self.ask(name)
        return self.quorum

    def ask_fenced(self, names: str, head: Head | None = None, voted: Vote | None = None) -> None:
        """These gave up the last quorum; they stand at its base if not told otherwise."""
        for name in names.split():
            self.ask(name, Position(self.quorum.id, head or self.quorum.base, voted, level=True))

    @property
    def quorum(self) -> Quorum:
        assert self.core.q_last is not None
        return self.core.q_last

    @property
    def members(self) -> str:
        """Members of the last quorum in order; joiners in brackets."""
        names = [(name_of(m.process), m.contributor) for m in self.quorum.members]
        return " ".join(name if level else f"({name})" for name, level in names)

    def words(self, name: str) -> list[Down]:
        """What was sent to this process since last looked at."""
        return self.inbox.pop(process(name), [])

    def revocations(self, name: str) -> list[tuple[int, bool]]:
        return [(w.quorum_id, w.now) for w in self.words(name) if isinstance(w, Revoke)]

    def retired(self, name: str) -> list[Retired]:
        return [w for w in self.words(name) if isinstance(w, Retired)]

    def announcements(self, name: str) -> str:
        return " ".join(w.text for w in self.words(name) if isinstance(w, Announce))

    @property
    def waiting(self) -> str:
        return self.core.view(self.now_ms).waiting

    # --- effects --------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        self.core.validate()
        for effect in effects:
            match effect:
                case Store():
                    stored = self.record.epoch if self.record is not None else None
                    assert effect.expected_epoch == stored, "the core knows what it has stored"
                    self.record = effect.record
                case Send():
                    if isinstance(effect.message, Form):
                        self._sent(effect.message.quorum)
                    self.inbox[effect.process].append(effect.message)
                case SendPing():
                    self.pings.append(effect.process)
                case Close():
                    self.closed.append((effect.process, effect.session))
                case Note():
                    pass

    def _sent(self, quorum: Quorum) -> None:
        assert self.record is not None, "stored before anyone is told (L1)"
        assert self.record.q_last == quorum, "stored before anyone is told (L1)"
        if not self.quorums or self.quorums[-1] is not quorum:
            if self.quorums and self.quorums[-1] != quorum:
                assert quorum.id > self.quorums[-1].id
            self.quorums.append(quorum)


def trio(**config: int) -> Driver:
    """Three members in their first quorum."""
    driver = Driver(min_replicas=1, expected_replicas=3, **config)
    driver.form("a b c")
    for name in "abc":
        driver.words(name)
    return driver


def process(name: str) -> Process:
    """ "a" and "a1" are the first incarnation of replica a, "a2" the second."""
    replica, number = (name[:-1], name[-1]) if name[-1].isdigit() else (name, "1")
    return Process(replica, number)


def name_of(who: Process) -> str:
    return who.replica_id + ("" if who.incarnation == "1" else who.incarnation)
