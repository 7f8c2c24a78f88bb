"""Plays a scenario on the real quorum core: members do what the lines say, and adopt what they are told.

A member is a small book-keeper of its position. It answers pings, sends heartbeats while time passes, and adopts
quorums as rule M5 wants; when it votes, commits, gives up a quorum and asks is written in the scenario. What a
real member could not have done is refused with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from core_driver import CLOCK_SECONDS, START, Driver, name_of, process
from scenario_script import Grammar, Line, ScenarioError

from lighthouse.core.base import holds
from lighthouse.messages import Announce, Down, Form, Head, Position, Quorum, Retired, Revoke, Vote

STRIDE_MS = 500
"""Words are read at least so often while time passes."""


class ExpectationError(AssertionError):
    """What was expected did not happen: the line, what happened instead, and the story of the core."""


@dataclass
class Member:
    """One process of the cast."""

    name: str
    head: Head = START
    disk_head: Head | None = None
    voted: Vote | None = None
    floor: int = 0
    level: bool = True
    quorum: Quorum | None = None
    revoked_id: int = 0
    asked: bool = False
    leaving: bool = False
    alive: bool = True
    reachable: bool = True
    connected: bool = False
    retired: Retired | None = None

    def position(self) -> Position:
        """What hello and ask say."""
        return Position(self.floor, self.head, self.voted, self.level, self.disk_head)

    def in_force(self) -> Quorum:
        """The quorum under which it may act."""
        if not self.alive or self.quorum is None or self.quorum.id <= self.floor:
            raise ScenarioError(f"{self.name} has no quorum in force: it can neither vote nor commit")
        return self.quorum


class Play:
    """One Lighthouse, one job, and its members."""

    def __init__(self) -> None:
        self.settings: dict[str, int] = {}
        self.cast: dict[str, Member] = {}
        self.disks: dict[str, Head] = {}
        self.quorums: list[Quorum] = []
        self.news: list[Quorum] = []
        self.revocations: dict[str, bool] = {}
        self.announcements: list[str] = []
        self._driver: Driver | None = None
        self._lighthouses = 0

    def perform(self, line: Line) -> None:
        """Do what one line says, then let everybody read what was sent."""
        GRAMMAR.action(line.text)(self)
        self._settle()

    def end(self) -> None:
        """Nothing that matters may have gone unmentioned."""
        self._check(not self.news, f"a quorum was not mentioned: {self._shown(self.news)}")
        losses = [text for text in self.announcements if "total loss" in text]
        self._check(not losses, f"a total loss was not mentioned: {losses}")

    @property
    def driver(self) -> Driver:
        """The Lighthouse; it starts with the first event."""
        if self._driver is None:
            self._driver = Driver(None, CLOCK_SECONDS, **self.settings)
        return self._driver

    def story(self) -> list[str]:
        """Why the core did what it did."""
        return self.driver.core.story()

    # --- processes and their streams --------------------------------------------------------------------------

    def given(self, setting: str, value: int) -> None:
        if self._driver is not None:
            raise ScenarioError("settings come first: the Lighthouse has started")
        self.settings[setting] = value

    def join(self, names: list[str]) -> None:
        """New processes connect, all of them, and then ask."""
        for name in names:
            if name in self.cast:
                raise ScenarioError(f"{name} has joined before: a second process of it is called {name[0]}2")
            disk = self.disks.get(process(name).replica_id)
            self.cast[name] = Member(name, disk or START, disk)
            self.reconnect([name])
        self.ask([name for name in names if self.cast[name].alive])

    def restart(self, old: str, new: str) -> None:
        """A new process of the same replica, with what is on its disk; the old one is not touched."""
        if process(old).replica_id != process(new).replica_id:
            raise ScenarioError(f"{new} is no process of the replica of {old}")
        self.join([new])

    def reconnect(self, names: list[str]) -> None:
        """A new stream, opened with all that the member knows."""
        for name in names:
            member = self._alive(name)
            member.reachable = member.connected = True
            self.driver.connect(name, member.quorum, member.position())
            self._settle()
            if member.asked and member.connected:
                self.driver.ask(name, member.position(), member.leaving)

    def cut(self, names: list[str]) -> None:
        """Nothing passes any more, and no stream breaks: a network cut, a frozen process, a host without power."""
        for name in names:
            self._alive(name).reachable = False

    def break_stream(self, names: list[str]) -> None:
        """The stream breaks; the process goes on."""
        for name in names:
            self._alive(name).connected = False
            self.driver.disconnect(name)

    def crash(self, names: list[str]) -> None:
        """The process dies and its sockets close; nobody says why."""
        self.break_stream(names)
        for name in names:
            self.cast[name].alive = False

    def exit(self, names: list[str]) -> None:
        """The process dies, and its launcher reports it."""
        for name in names:
            member = self._member(name)
            member.alive = member.connected = False
            self.driver.exit_seen(name)
            self.driver.disconnect(name)

    def lighthouse_restarts(self, keep_store: bool = True) -> None:
        """All streams break; the new one knows what is stored, or nothing."""
        record = self.driver.record if keep_store else None
        self._lighthouses += 1
        for member in self.cast.values():
            member.connected = False
        sessions = self.driver.sessions
        self._driver = Driver(record, CLOCK_SECONDS + self._lighthouses, **self.settings)
        self._driver.sessions = sessions

    def lighthouse_loses_its_disk(self) -> None:
        self.lighthouse_restarts(keep_store=False)

    def tick(self, ms: int) -> None:
        """Time passes; whoever can be heard is heard."""
        end_ms = self.driver.now_ms + ms
        self.driver.steps.update((process(m.name), m.head.step) for m in self.cast.values())
        while self.driver.now_ms < end_ms:
            heard = " ".join(m.name for m in self.cast.values() if m.alive and m.reachable and m.connected)
            self.driver.wait(min(STRIDE_MS, end_ms - self.driver.now_ms), beats=heard)
            self._settle()

    # --- members ------------------------------------------------------------------------------------------------

    def ask(self, names: list[str]) -> None:
        """Give up the quorum for good, and ask for the next one."""
        for name in names:
            member = self._alive(name)
            adopted_id = member.quorum.id if member.quorum is not None else 0
            member.floor = max(member.floor, adopted_id, member.revoked_id)
            member.asked = True
            if member.reachable and member.connected:
                self.driver.ask(name, member.position(), member.leaving)

    def leave(self, names: list[str]) -> None:
        """The same, but to be out of the next quorum."""
        for name in names:
            self._alive(name).leaving = True
        self.ask(names)

    def fault(self, name: str, peer: str | None = None) -> None:
        """An operation failed under the last quorum."""
        if self._alive(name).reachable:
            self.driver.fault(name, process(peer).replica_id if peer is not None else None)

    def vote(self, names: list[str], step: int) -> None:
        """Say yes to the next step; the result is not known yet."""
        for name in names:
            member = self._alive(name)
            quorum = member.in_force()
            if step != member.head.step + 1:
                raise ScenarioError(f"{name} is at step {member.head.step}: it cannot vote for step {step}")
            member.voted = Vote(step, quorum.id)

    def commit(self, names: list[str], step: int) -> None:
        """Commit all steps up to this one."""
        for name in names:
            member = self._alive(name)
            if step <= member.head.step:
                raise ScenarioError(f"{name} is at step {member.head.step} already")
            member.head, member.voted = Head(step, member.in_force().id), None
        quorum = self.cast[names[0]].in_force()
        for other in (self.cast[name_of(m.process)] for m in quorum.members):
            knows = other.head.quorum_id == quorum.id and other.head.step >= step
            if not knows and other.voted != Vote(step, quorum.id):
                raise ScenarioError(
                    f"{other.name} has not voted for step {step}: nobody can have committed it"
                )

    def save(self, names: list[str]) -> None:
        """A checkpoint on disk."""
        for name in names:
            member = self._alive(name)
            self.disks[process(name).replica_id] = member.disk_head = member.head

    def level(self, names: list[str]) -> None:
        """A joiner has caught up; says so again if it has asked."""
        for name in names:
            member = self._alive(name)
            member.level = True
            if member.asked:
                self.ask([name])

    # --- expectations -------------------------------------------------------------------------------------------

    def expect_quorum(self, members: str) -> None:
        """One new quorum since the last look: these, in order of rank, joiners in brackets; all were told."""
        self._check(len(self.news) == 1, f"new quorums: {self._shown(self.news)}")
        quorum = self.news.pop()
        self._check(members_of(quorum) == members, f"the quorum is {{{members_of(quorum)}}}")
        told = (self.cast[name_of(m.process)] for m in quorum.members)
        missing = [m.name for m in told if m.alive and m.reachable and m.quorum != quorum]
        self._check(not missing, f"not told: {missing}")

    def expect_no_quorum(self) -> None:
        """No new quorum since the last look."""
        self._check(not self.news, f"new quorums: {self._shown(self.news)}")

    def expect_still(self, members: str) -> None:
        """The last quorum goes on: no other one, no round, no revocation since the last look."""
        self.expect_no_quorum()
        self.expect_no_revoke()
        self._check(self.driver.core.q_last is not None, "no quorum is known")
        self._check(self.driver.members == members, f"the quorum is {{{self.driver.members}}}")
        reason = self.driver.core.view(self.driver.now_ms).round
        self._check(not reason, f"a round is open: {reason}")

    def expect_base(self, step: int, number: int | None = None) -> None:
        """Where the last quorum begins; ``number`` counts the quorums of the scenario and says who committed it."""
        base = self.driver.quorum.base
        self._check(base.step == step, f"the base is step {base.step}")
        if number is not None:
            committed_by = [n for n, q in enumerate(self.quorums, 1) if q.id == base.quorum_id]
            self._check(committed_by == [number], f"the base was committed by quorum {committed_by}")

    def expect_reason(self, text: str) -> None:
        self._check(text in self.driver.quorum.reason, f"the reason is: {self.driver.quorum.reason}")

    def expect_roll_forward(self) -> None:
        self.expect_reason("rolled forward")

    def expect_retry(self) -> None:
        self.expect_reason("goes on from step")

    def expect_revoke(self, how: str, names: list[str] | None = None) -> None:
        """These (somebody, if nobody is named) were told since the last look to give up their quorum."""
        seen, self.revocations = self.revocations, {}
        self._check(bool(seen), "nothing was revoked")
        self._check(set(seen.values()) == {how == "now"}, f"revoked (now?): {seen}")
        self._check(names is None or sorted(names) == sorted(seen), f"revoked: {sorted(seen)}")

    def expect_no_revoke(self) -> None:
        self._check(not self.revocations, f"revoked (now?): {self.revocations}")

    def expect_announce(self, text: str) -> None:
        seen, self.announcements = self.announcements, []
        self._check(any(text in sentence for sentence in seen), f"announced: {seen}")

    def expect_no_announce(self) -> None:
        self._check(not self.announcements, f"announced: {self.announcements}")

    def expect_waiting(self, text: str) -> None:
        self._check(text in self.driver.waiting, f"waiting {self.driver.waiting or 'for nobody'}")

    def expect_left(self, names: list[str]) -> None:
        for name in names:
            retired = self._member(name).retired
            self._check(retired is not None and retired.left, f"{name}: {retired}")

    def expect_turned_away(self, name: str, text: str = "") -> None:
        retired = self._member(name).retired
        self._check(retired is not None and not retired.left and text in retired.reason, f"{name}: {retired}")

    def expect_stays(self, names: list[str]) -> None:
        for name in names:
            self._check(self._member(name).retired is None, f"{name}: {self._member(name).retired}")

    # --- words from the Lighthouse --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Everybody reads what was sent to it, until nothing is under way."""
        moved = self._driver is not None
        while moved:
            moved = False
            for member in self.cast.values():
                moved |= self._read(member)
        if self._driver is not None:
            known = {quorum.id for quorum in self.quorums}
            fresh = [quorum for quorum in self.driver.quorums if quorum.id not in known]
            self._check(all(q.id > max(known, default=0) for q in fresh), "a quorum id is not new")
            self.quorums += fresh
            self.news += fresh

    def _read(self, member: Member) -> bool:
        who = process(member.name)
        words, pings = self.driver.words(member.name), self.driver.pings.count(who)
        closed = (who, self.driver.sessions[who]) in self.driver.closed
        self.driver.pings = [other for other in self.driver.pings if other != who]
        if not member.alive or not member.reachable:
            return False
        for word in words:
            self._take(member, word)
        if closed:
            member.connected = False
            self.driver.closed.remove((who, self.driver.sessions[who]))
        if pings and member.connected:
            self.driver.pong(member.name)
        return bool(words or pings)

    def _take(self, member: Member, word: Down) -> None:
        match word:
            case Form():
                self._adopt(member, word.quorum)
            case Revoke():
                member.revoked_id = max(member.revoked_id, word.quorum_id)
                self.revocations[member.name] = word.now
            case Retired():
                member.alive, member.retired = False, word
            case Announce():
                if word.text not in self.announcements:
                    self.announcements.append(word.text)

    def _adopt(self, member: Member, quorum: Quorum) -> None:
        """Rule M5."""
        adopted_id = member.quorum.id if member.quorum is not None else 0
        if quorum.id <= max(member.floor, adopted_id):
            return
        if quorum.reload and not holds(member.position(), quorum.base):
            member.head, member.level, member.voted = member.disk_head or START, True, None
        rank = quorum.rank_of(process(member.name))
        assert rank is not None, "only members are told"
        member.level = member.level and holds(member.position(), quorum.base)
        assert member.level or not quorum.members[rank].contributor, "a contributor holds the base"
        member.head, member.voted, member.quorum, member.asked = quorum.base, None, quorum, False

    # --- small helpers ----------------------------------------------------------------------------------------------

    def _member(self, name: str) -> Member:
        if name not in self.cast:
            raise ScenarioError(f"{name} has not joined")
        return self.cast[name]

    def _alive(self, name: str) -> Member:
        member = self._member(name)
        if not member.alive:
            raise ScenarioError(f"{name} is not alive any more")
        return member

    def _shown(self, quorums: list[Quorum]) -> str:
        return " ".join(f"{{{members_of(quorum)}}}" for quorum in quorums) or "none"

    def _check(self, met: bool, instead: str) -> None:
        if not met:
            raise ExpectationError(instead)


def members_of(quorum: Quorum) -> str:
    """Names in order of rank, joiners in brackets."""
    names = [(name_of(member.process), member.contributor) for member in quorum.members]
    return " ".join(name if contributor else f"({name})" for name, contributor in names)


GRAMMAR = Grammar(
    {
        "given WORD NUMBER": Play.given,
        "join NAMES": Play.join,
        "restart NAME as NAME": Play.restart,
        "reconnect NAMES": Play.reconnect,
        "cut NAMES": Play.cut,
        "break NAMES": Play.break_stream,
        "crash NAMES": Play.crash,
        "exit NAMES": Play.exit,
        "lighthouse restarts": Play.lighthouse_restarts,
        "lighthouse restarts without its disk": Play.lighthouse_loses_its_disk,
        "tick TIME": Play.tick,
        "ask NAMES": Play.ask,
        "leave NAMES": Play.leave,
        "fault NAME": Play.fault,
        "fault NAME names NAME": Play.fault,
        "vote NAMES NUMBER": Play.vote,
        "commit NAMES NUMBER": Play.commit,
        "save NAMES": Play.save,
        "level NAMES": Play.level,
        "expect quorum MEMBERS": Play.expect_quorum,
        "expect no quorum": Play.expect_no_quorum,
        "expect still MEMBERS": Play.expect_still,
        "expect base NUMBER": Play.expect_base,
        "expect base NUMBER of quorum NUMBER": Play.expect_base,
        "expect reason TEXT": Play.expect_reason,
        "expect roll forward": Play.expect_roll_forward,
        "expect retry": Play.expect_retry,
        "expect revoke HOW": Play.expect_revoke,
        "expect revoke HOW to NAMES": Play.expect_revoke,
        "expect no revoke": Play.expect_no_revoke,
        "expect announce TEXT": Play.expect_announce,
        "expect no announce": Play.expect_no_announce,
        "expect waiting TEXT": Play.expect_waiting,
        "expect left NAMES": Play.expect_left,
        "expect stays NAMES": Play.expect_stays,
        "expect turned away NAME": Play.expect_turned_away,
        "expect turned away NAME because TEXT": Play.expect_turned_away,
    }
)
