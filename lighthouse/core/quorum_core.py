"""The quorum core of one job: events in, effects out, time is an argument. Rules L1-L8 and R1-R4 of the design.

``now_ms`` is the running time of the Lighthouse (``RunningClock``): silence counts only while it ran itself.
"""

from __future__ import annotations

from lighthouse.core import forming, rounds
from lighthouse.core.blame import EVERYBODY, Blame
from lighthouse.core.chronicle import Chronicle
from lighthouse.core.forming import Plan, View, Wait
from lighthouse.core.roster import LEFT, Peer, Roster, Wakeups
from lighthouse.core.rounds import Round
from lighthouse.core.views import peer_views
from lighthouse.core.words import (
    Connected,
    CoreConfig,
    Disconnected,
    Effect,
    Event,
    ExitSeen,
    JobView,
    Ponged,
    Received,
    Record,
    Resumed,
    Send,
    Store,
)
from lighthouse.messages import Ask, Beat, Fault, Form, Member, Process, Quorum, Revoke

EPOCHS_PER_S = 1024
COUNTER_BITS = 22
"""An id is epoch << 22 | counter: as seconds << 32 was, so that ids grew on when epochs became finer."""
MAX_EPOCH = 2**41 - 1
"""Ids stay below 2^63."""


class QuorumCore:
    """Decides for one job.

    Args:
        config: settings.
        record: what is stored, or None.
        clock_seconds: Unix time at the start of the Lighthouse; keeps ids growing if the store was lost (F18), however
            often it was started before.
        now_ms: running time.
    """

    def __init__(self, config: CoreConfig, record: Record | None, clock_seconds: float, now_ms: int) -> None:
        self.config = config
        self.epoch = max(record.epoch if record is not None else 0, int(clock_seconds * EPOCHS_PER_S)) + 1
        self._counter = 0
        self._stored_epoch = record.epoch if record is not None else None
        self._highest_id = 0
        self._highest_step = 0
        self._forgotten_id = 0
        """The highest quorum of which was said that nobody reports it."""
        self._reported: Quorum | None = None
        self._reported_ms = now_ms
        self._previous: tuple[int, frozenset[str]] = (0, frozenset())
        """Id and members of the quorum before the last one."""
        self._round: Round | None = None
        self._fault: str | None = None
        self._total_loss_since_ms: int | None = None
        self._seniority: dict[Process, int] = {}
        """Since which quorum each member has been in without a break."""
        self._effects: list[Effect] = []
        self._wakeups = Wakeups(now_ms)
        self._blame = Blame(config.timeouts.heartbeat_timeout_ms)
        self._roster = Roster(config, self._effects, self._wakeups)
        self._chronicle = Chronicle(self._roster)
        self._awaited: set[str] = set()
        """Members without whose asks the round cannot end."""
        if record is not None and record.q_last is not None:
            self._roster.set_last(record.q_last)
            self._roster.gone.update(record.gone)
            if record.ended:
                self._roster.gone.update((m.process, LEFT) for m in record.q_last.members)
            self._roster.expect(record.q_last)
            self._highest_id, self._highest_step = record.q_last.id, record.q_last.base.step
            self._chronicle.tell(f"quorum {record.q_last.id} was stored and is in force again (rule R1)")

    # --- what the shell asks --------------------------------------------------------------------------------

    @property
    def q_last(self) -> Quorum | None:
        """The last quorum formed."""
        return self._roster.q_last

    def start(self) -> list[Effect]:
        """Claim the epoch; the first effects of this core."""
        self._store()
        self._advance()
        return self._take()

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take an event; returns what to do, in order."""
        if self.note(event, now_ms):
            self._advance()
        return self._take()

    def note(self, event: Event, now_ms: int) -> bool:
        """Take an event, and leave the decisions to the next ``tick``; False if there is nothing to decide.

        The rules look at the state only, so that many events may share one look: each costs as much as there are
        members.
        """
        self._wakeups.now_ms = now_ms
        return self._apply(event)

    def tick(self, now_ms: int) -> list[Effect]:
        """Time has passed."""
        self._wakeups.now_ms = now_ms
        self._advance()
        return self._take()

    def deadline(self) -> int | None:
        """When ``tick`` has something to do at the latest; None: only after an event."""
        return self._wakeups.next_ms

    @property
    def stored_epoch(self) -> int | None:
        """The epoch under which this core has stored; another one in the store means that it was superseded (F19)."""
        return self._stored_epoch

    def story(self) -> list[str]:
        """The last decisions, one sentence each."""
        return self._chronicle.story()

    def view(self, now_ms: int) -> JobView:
        """The state, for people and tools."""
        reason = self._round.reason if self._round is not None else ""
        waiting = (
            forming.awaited_text(self._roster, self._awaited) if self._awaited else self._chronicle.waiting
        )
        peers, story = peer_views(self._roster, self._blame, now_ms), tuple(self.story())
        return JobView(self.epoch, self.q_last, reason, waiting, peers, story)

    def validate(self) -> None:
        """Raise AssertionError if the state breaks an invariant."""
        roster = self._roster
        for replica_id, peer in roster.peers.items():
            assert peer.replica_id == replica_id
            assert peer.process not in roster.gone, f"{peer.process} is gone and yet there"
            assert peer.ask is None or peer.connected, "an ask stands only on an open session"
            assert not (peer.connected and peer.lost), "who is connected is not lost"
        for replica_id, pending in roster.pending.items():
            assert replica_id in roster.peers, "a new incarnation waits only for an old one"
            assert roster.peers[replica_id].process != pending.process
        if self.q_last is not None:
            assert self.q_last.members, "a quorum has members"
            assert self.q_last.id <= self._highest_id
            assert all(p is not None or m in roster.gone for m, p in roster.members(self.q_last))
            if self._round is None:
                assert self._reported is not None or all(p and not p.lost for _, p in self._members()), (
                    "a lost member opens a round"
                )
        assert self._stored_epoch is None or self._stored_epoch <= self.epoch

    # --- events ---------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> bool:
        """Note the event; True if it may change a decision."""
        match event:
            case Connected():
                peer = self._roster.hello(event.process, event.session, event.hello)
                if peer is not None:
                    self._learn(peer, peer.adopted)
            case Received():
                return self._received(event)
            case Ponged():
                self._roster.ponged(event.process, event.session)
            case Disconnected():
                self._roster.disconnected(event.process, event.session)
            case ExitSeen():
                self._exit_seen(event.process)
            case Resumed():
                self._roster.resumed()
                self._chronicle.tell("this Lighthouse was paused: members get the time to reconnect")
        return True

    def _received(self, event: Received) -> bool:
        message = event.message
        peer = self._roster.on_session(event.process, event.session)
        if peer is None:
            pending = self._roster.pending.get(event.process.replica_id)
            if pending is not None and (pending.process, pending.session) == (event.process, event.session):
                pending.ask = message if isinstance(message, Ask) else pending.ask
                pending.answering |= isinstance(message, Beat)
            return False
        match message:
            case Beat():
                self._count_steps(peer, message.progress.step)
                return self._roster.beat(peer, message.progress)
            case Ask():
                self._ask(peer, message)
                return not self._only_one_less(peer)
            case Fault():
                self._fault_reported(peer, message)
        return True

    def _ask(self, peer: Peer, ask: Ask) -> None:
        if not self._roster.counts(peer):
            peer.asked_ms = self._wakeups.now_ms  # a late repetition of an old ask does not start the clock
        peer.ask = ask
        self._roster.heard(peer, ask.position)
        self._learn(peer, None)

    def _only_one_less(self, peer: Peer) -> bool:
        """True if the round goes on as before, with one member less to wait for (most asks of a large quorum)."""
        round_ = self._round
        if round_ is None or round_.first_ask_ms is None or not self._roster.counts(peer):
            return False
        self._awaited.discard(peer.replica_id)
        return bool(self._awaited) and self._roster.is_member(peer)

    def _fault_reported(self, peer: Peer, fault: Fault) -> None:
        self._roster.hear(peer)
        previous_id, previous_members = self._previous
        if fault.quorum_id == previous_id and peer.replica_id in previous_members:
            # Too late to matter for that quorum; and yet who reports first is chance, and a link has two ends.
            if fault.peer in previous_members - {peer.replica_id}:
                self._blame.fault(previous_id, peer.replica_id, fault.peer)
            return
        if self.q_last is None or fault.quorum_id != self.q_last.id or not self._roster.is_member(peer):
            return
        named = self._roster.peers.get(fault.peer) if fault.peer is not None else None
        if named is not None and named is not peer and self._roster.is_member(named):
            named.named = True
            self._blame.fault(fault.quorum_id, peer.replica_id, named.replica_id)
        about = f" about {fault.peer}" if fault.peer else ""
        self._fault = f"{peer.replica_id} reports a fault{about}: {fault.reason}"

    def _exit_seen(self, process: Process) -> None:
        if not process.incarnation:
            named = [m.process for m in self.q_last.members] if self.q_last is not None else []
            named += [m.process for m in self._reported.members] if self._reported is not None else []
            named = [p for p in named if p.replica_id == process.replica_id]
            current = self._roster.peers.get(process.replica_id)
            process = named[0] if named else current.process if current is not None else process
        if process.incarnation and process not in self._roster.gone:
            self._roster.retire(process, "its exit was reported")
            if process in self._roster.ranks:
                self._store()  # the launcher says it once, perhaps to a Lighthouse that is restarted before the next quorum

    def gone_because(self, process: Process) -> str | None:
        """Why ``process`` is counted out for good; None if it is not."""
        return self._roster.gone.get(process)

    def knows(self, process: Process) -> bool:
        """True if this process (empty incarnation: any of that replica) was met or is in a quorum."""
        met = [p.process for p in self._roster.peers.values()]
        met += [p.process for p in self._roster.pending.values()]
        met += [m.process for q in (self.q_last, self._reported) if q is not None for m in q.members]
        if not process.incarnation:
            return any(p.replica_id == process.replica_id for p in met)
        return process in met

    def _count_steps(self, peer: Peer, step: int) -> None:
        """Note how far the run has come, to say what a total loss costs: not what an earlier one has given up."""
        if peer.position is None or (self.q_last is not None and not self._roster.is_member(peer)):
            return
        head = peer.position.head
        # A joiner's training still stands where it was left behind, perhaps on a chain that was given up.
        moved_on = peer.position.level and step > head.step
        if self.q_last is None or head.quorum_id == self.q_last.id or moved_on:
            self._highest_step = max(self._highest_step, step)

    def _learn(self, peer: Peer, quorum: Quorum | None) -> None:
        """Take note of ids, steps and quorums that a member reports."""
        position = peer.position
        assert position is not None
        heads = [position.head] + ([position.disk_head] if position.disk_head is not None else [])
        ids = [position.floor, *(h.quorum_id for h in heads), quorum.id if quorum is not None else 0]
        self._highest_id = max(self._highest_id, *(i for i in ids if i >> COUNTER_BITS < MAX_EPOCH))
        self._count_steps(peer, position.head.step)
        newest = max((q.id for q in (self.q_last, self._reported) if q is not None), default=0)
        if quorum is not None and newest < quorum.id <= self._highest_id:
            if self._reported is None:
                self._reported_ms = self._wakeups.now_ms
            self._reported = quorum
            self._roster.expect(quorum)
            self._chronicle.tell(f"{peer.process} reports quorum {quorum.id}, newer than what is stored (R2)")

    # --- decisions ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Apply all rules to the present state; doing it twice changes nothing."""
        self._wakeups.next_ms = None
        self._apply_rules()
        while self._roster.has_orphans():
            self._apply_rules()
        self._chronicle.announce_wait()

    def _apply_rules(self) -> None:
        roster = self._roster
        roster.find_lost()
        for peer, ask in roster.resolve_pending():
            self._learn(peer, peer.adopted)
            if ask is not None:
                self._ask(peer, ask)
        roster.find_overdue()
        self._adopt_reported()
        if self._reported is None:
            self._let_strangers_leave()
            self._open_round()
            self._form()
            self._answer_hellos()
            self._revoke()
        reported = (
            {m.process for m in self._reported.members} if self._reported is not None else set[Process]()
        )
        roster.forget_strangers(reported)

    def _adopt_reported(self) -> None:
        """Rule R2: a reported record becomes the last quorum when each member is here or certainly gone.

        Not before all had the time to connect: the first who reports need not be in the newest quorum.
        """
        reported = self._reported
        if reported is None:
            return
        missing: list[str] = []
        for process, peer in self._roster.members(reported):
            if peer is None and process not in self._roster.gone:
                self._roster.retire(process, "another incarnation has taken its place")
            elif peer is not None and not peer.connected:
                gone_ms = peer.heard_ms + self.config.certainly_gone_ms
                if not self._wakeups.due(gone_ms):
                    missing.append(str(process))
        if not self._wakeups.due(self._reported_ms + self.config.restart_grace_ms):
            missing.append("members of a newer one, if there is any")
        if missing:
            self._chronicle.wait(f"for members of the reported quorum {reported.id}: {', '.join(missing)}")
            return
        self._roster.set_last(reported)
        self._highest_step = reported.base.step
        for _, peer in self._members():
            if peer is not None and peer.position is not None:
                self._count_steps(peer, peer.position.head.step)
        self._reported, self._round, self._fault = None, None, None
        self._chronicle.wait("")
        self._store()
        self._chronicle.tell(f"quorum {reported.id}, as reported by its members, is in force again (rule R2)")
        self._announce_forgotten(reported, self._highest_id)

    def _announce_forgotten(self, quorum: Quorum, known_id: int) -> None:
        """Say if there was a later quorum than ``quorum``, with which training goes on: a floor, head or checkpoint names it.

        Its members are all away, and the store that knew it was lost; what it committed may still lie on a disk.
        """
        if known_id > max(quorum.id, self._forgotten_id):
            self._forgotten_id = known_id
            self._chronicle.announce(
                f"total loss: there was a quorum {known_id}, and nobody reports it; the store was lost and all "
                f"its members are away, so training goes on from quorum {quorum.id} without their steps"
            )

    def _let_strangers_leave(self) -> None:
        for peer in list(self._roster.peers.values()):
            if peer.ask is not None and peer.ask.leaving and not self._roster.is_member(peer):
                self._roster.retire(peer.process, LEFT, left=True)

    def _open_round(self) -> None:
        """Rule L2."""
        urgent = rounds.urgent_reason(self._roster, self._fault, self._round)
        wish = urgent or rounds.wish(self._roster, self._blame)
        if self._round is None and wish is not None:
            self._round = Round(wish, now=urgent is not None)
            self._total_loss_since_ms = None
            self._note_revoke(self._round)
        elif self._round is not None and urgent is not None and not self._round.now:
            self._round.reason, self._round.now = urgent, True
            self._note_revoke(self._round)
        if self._round is None:
            return
        first = rounds.first_ask_ms(self._roster)
        self._round.first_ask_ms = first
        if not self._round.now and first is not None and self.q_last is not None:
            self._round.now = self._wakeups.due(first + self.config.boundary_grace_ms)

    def _form(self) -> None:
        """Rules L4, L5, L8, R3."""
        if self._round is None:
            return
        if not self._wakeups.due(self._blame.out_until_ms(EVERYBODY)):
            self._chronicle.wait("before the next try: these members have failed to work together (rule L8)")
            return
        first_ask_ms = self._round.first_ask_ms
        view = View(self.config, first_ask_ms, self._total_loss_since_ms, self._highest_step)
        plan = forming.decide(view, self._roster, self._blame)
        if isinstance(plan, Wait) and plan.total_loss and self._total_loss_since_ms is None:
            self._total_loss_since_ms = self._wakeups.now_ms
            view = View(self.config, first_ask_ms, self._total_loss_since_ms, self._highest_step)
            plan = forming.decide(view, self._roster, self._blame)
        self._awaited = set(plan.awaited) if isinstance(plan, Wait) else set()
        if isinstance(plan, Wait):
            if not plan.total_loss:
                self._total_loss_since_ms = None
            if plan.release_leavers:
                self._release_leavers(set())
                self._end_if_all_left()
            if plan.start_over:
                self._start_over()
            self._chronicle.wait(plan.text)
        elif (thinned := self._apply_blame(plan)) is not None:
            self._install(thinned)

    def _apply_blame(self, plan: Plan) -> Plan | None:
        """Rule L8. None: nobody can be spared, the next quorum waits."""
        if self.q_last is None or plan.committed:
            return plan
        processes = [p.process for p in plan.members]
        self._blame.quorum_ended(self.q_last, committed=False)
        if not self._blame.must_leave_one_out(processes):
            return plan
        oldest_first = sorted(processes, key=lambda p: self._seniority.get(p, self._roster.ranks.get(p, 0)))
        victim = forming.spared(plan, self._blame, self.config.min_replicas, oldest_first)
        name = victim.replica_id if victim is not None else EVERYBODY
        named = victim or forming.spared(plan, self._blame, 0, oldest_first) or plan.members[-1]
        link = self._blame.link(named.replica_id)
        delay_ms = self._blame.leave_out(name, self._wakeups.now_ms)
        what = "the same members failed twice to commit a step together"
        if victim is None:
            self._chronicle.announce(f"{what} and none can be spared; next try in {delay_ms} ms; {link}")
            self._wakeups.due(self._wakeups.now_ms + delay_ms)
            return None
        self._chronicle.announce(f"{what}; {name} is left out for {delay_ms} ms; {link}")
        left = tuple(p for p in plan.members if p is not victim)
        return Plan(left, plan.holders - {victim.process}, plan.base, plan.reload, False, plan.reason)

    def _install(self, plan: Plan) -> None:
        """Store first, then tell (rule L1)."""
        assert self._round is not None
        if plan.committed and self.q_last is not None:
            self._blame.quorum_ended(self.q_last, committed=True)
        members = tuple(Member(p.process, p.address, p.process in plan.holders) for p in plan.members)
        reason = f"{self._round.reason}; {plan.reason}" if self.q_last is not None else plan.reason
        before, known_id = self.q_last, self._highest_id
        quorum = Quorum(self._next_id(), members, plan.base, plan.reload, reason)
        if before is not None:
            self._previous = (before.id, frozenset(p.replica_id for p in self._roster.ranks))
        self._roster.set_last(quorum)
        self._highest_step = quorum.base.step
        self._round, self._fault, self._total_loss_since_ms = None, None, None
        self._store()
        if before is not None and not plan.announce:
            self._announce_forgotten(before, known_id)
        if plan.announce:
            self._chronicle.announce(plan.announce)
        self._seniority = {p.process: self._seniority.get(p.process, quorum.id) for p in plan.members}
        form = Form(quorum)
        for peer in plan.members:
            self._effects.append(Send(peer.process, peer.session, form))
            peer.had_quorum = peer.greeted = True
            peer.ask, peer.named = None, False
        self._release_leavers({p.process for p in plan.members})
        self._chronicle.wait("")
        names = ", ".join(m.process.replica_id + ("" if m.contributor else " (joins)") for m in members)
        text = f"quorum {quorum.id} of {len(members)} formed: {names}; {reason}"
        fields = {
            "quorum_id": quorum.id,
            "members": [m.process.replica_id for m in members],
            "base_step": quorum.base.step,
            "reason": reason,
        }
        self._chronicle.tell(text, "formed", fields)

    def _release_leavers(self, staying: set[Process]) -> None:
        for peer in list(self._roster.peers.values()):
            if peer.ask is not None and peer.ask.leaving and peer.process not in staying:
                self._roster.retire(peer.process, LEFT, left=True)

    def _end_if_all_left(self) -> None:
        """A run that ended in good order leaves nothing for which the next run of this job should wait."""
        if self.q_last is not None and self._roster.run_has_ended():
            self._chronicle.tell(f"all members of quorum {self.q_last.id} have left: the run has ended")
            self._store()

    def _start_over(self) -> None:
        """The worst total loss: joiners are left alone, without even an initial state."""
        self._chronicle.announce(
            f"total loss: nobody holds any state, {self._highest_step} steps are lost; all have to restart"
        )
        for peer in list(self._roster.peers.values()):
            if self._roster.counts(peer):
                self._roster.retire(peer.process, "total loss: it holds no state, restart it")

    # --- what members need to know -----------------------------------------------------------------------------

    def _answer_hellos(self) -> None:
        """A member that has not adopted the last quorum gets it again (rule L3), unless it is being replaced."""
        for process, peer in self._members():
            if peer is None or not peer.connected or peer.greeted:
                continue
            peer.greeted = True
            assert self.q_last is not None
            adopted_id = peer.adopted.id if peer.adopted is not None else 0
            if self._round is None and max(peer.floor(), adopted_id) < self.q_last.id:
                self._effects.append(Send(process, peer.session, Form(self.q_last)))

    def _revoke(self) -> None:
        """Tell who has to give up the last quorum, or an older one."""
        if self.q_last is None:
            return
        for peer in self._roster.peers.values():
            if not peer.connected or peer.floor() >= self.q_last.id:
                continue
            if not self._roster.is_member(peer):
                if peer.had_quorum:
                    self._send_revoke(peer, True, "it is not in the last quorum")
            elif self._round is not None:
                self._send_revoke(peer, self._round.now, self._round.reason)

    def _send_revoke(self, peer: Peer, now: bool, reason: str) -> None:
        assert self.q_last is not None
        done = peer.revoked
        if done[0] == self.q_last.id and (done[1] or not now):
            return
        peer.revoked = (self.q_last.id, now)
        self._effects.append(Send(peer.process, peer.session, Revoke(self.q_last.id, now, reason)))

    def _note_revoke(self, round_: Round) -> None:
        if self.q_last is None:
            return
        quorum_id, how = self.q_last.id, "now" if round_.now else "at the next step boundary"
        fields = {"quorum_id": quorum_id, "now": round_.now, "reason": round_.reason}
        self._chronicle.tell(f"quorum {quorum_id} is revoked {how}: {round_.reason}", "revoke", fields)

    # --- small helpers ----------------------------------------------------------------------------------------

    def _members(self) -> list[tuple[Process, Peer | None]]:
        return list(self._roster.members(self.q_last))

    def _next_id(self) -> int:
        """Above everything that anybody has ever seen: epoch << 22 | counter (rule L1, F18)."""
        self._counter += 1
        if (self.epoch << COUNTER_BITS) + self._counter <= self._highest_id:
            self.epoch, self._counter = (self._highest_id >> COUNTER_BITS) + 1, 1
        self._highest_id = (self.epoch << COUNTER_BITS) + self._counter
        return self._highest_id

    def _store(self) -> None:
        roster = self._roster
        gone = tuple((process, roster.gone[process]) for process in roster.ranks if process in roster.gone)
        record = Record(self.epoch, self.q_last, roster.run_has_ended(), gone)
        self._effects.append(Store(self._stored_epoch, record))
        self._stored_epoch = self.epoch

    def _take(self) -> list[Effect]:
        taken = list(self._effects)
        self._effects.clear()
        return taken
