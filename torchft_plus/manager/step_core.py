"""The step core: every decision of a replica group's leader, without I/O, clock or threads.

Rules M1-M8 of the design. Methods are events; each returns the effects to carry out, in order. ``now_ms`` is monotonic
time, given by the caller. ``story()`` tells how it came to be where it is; ``validate()`` checks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lighthouse.messages import Ask, Fault, Head, Hello, Position, Process, Progress, Quorum, Up, Vote
from lighthouse.timeouts import Timeouts
from torchft_plus.manager import words
from torchft_plus.manager.control_words import (
    Summary,
    from_head,
    merge_scalars,
    same_head,
    summarise,
    wrong_head,
)
from torchft_plus.manager.effects import ConnectMesh, Effect, Emit, SendPeers, SendUp, Tell, TellEach
from torchft_plus.pb import peer_pb2 as pb

STORY_LINES = 200
MAX_PINS = 2
"""Versions kept for joiners at once: each costs memory once the donor has moved on."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What does not change during one life of a group."""

    process: Process
    job_id: str
    address: str
    """Peer service of the leader, host:port."""
    group_world_size: int
    min_replica_size: int = 1
    windowed: bool = False
    """A step is a window of many inner steps: what may happen at a boundary happens at once while nothing is posted."""


@dataclass(slots=True)
class _Round:
    """Messages of one (step, round), which may arrive before this member is there."""

    blocks: dict[int, pb.ControlBlock] = field(default_factory=dict[int, pb.ControlBlock])
    yes: set[int] = field(default_factory=set[int])
    arrivals_ms: list[int] = field(default_factory=list[int])
    """When the block of each other group came."""


@dataclass(slots=True)
class _Attempt:
    """One attempt to reduce the step after the head, under the adopted quorum."""

    step: int
    round: int = 0
    posted: dict[int, pb.RankPosted] = field(default_factory=dict[int, pb.RankPosted])
    done: set[int] = field(default_factory=set[int])
    block_sent: bool = False
    objects: bool = False
    """A rank of this group objects: all its ranks have to post zeros, so the round is repeated."""
    voted: bool = False
    waiting_since_ms: int | None = None
    """When this group had done its part, and began to wait for the others."""


class StepCore:
    """Decides for one replica group. See the module's docstring."""

    def __init__(
        self, group: GroupInfo, timeouts: Timeouts, head: Head, disk_head: Head | None = None
    ) -> None:
        self.group = group
        self.timeouts = timeouts
        self.head = head
        self.disk_head = disk_head
        self.level = True
        self.floor = 0
        self.voted: Vote | None = None
        self.adopted: Quorum | None = None
        self.replica_rank = -1
        self.progress = Progress()
        self.last_heard_ms: int | None = None
        """Until when the Lighthouse has certainly heard this process: when the newest heartbeat that it answered was
        sent. Set by the shell. When its answer came would be too late: it may have lain in a socket through a pause."""
        self.ended: str | None = None
        """Set once this process is out: why."""
        self._held: Summary | None = None
        self._hellos: dict[int, pb.PeerHello] = {}
        self._configured: set[int] = set()
        self._configure_deadline_ms: int | None = None
        self._inbox: dict[tuple[int, int], _Round] = {}
        self._attempt = _Attempt(head.step + 1)
        self._retries = 0
        self._gone: set[int] = set()
        """Replica ranks that fenced or died after their yes: this quorum ends with the current step."""
        self._change_wanted = False
        self._leaving = False
        self._finished = False
        self._formed_when_finished = 0
        self._asked = False
        self._fetch_head: Head | None = None
        self._fetch_failed = False
        self._boundary: dict[int, pb.RankBoundary] = {}
        self._visits = 0
        """So many boundaries have been answered."""
        self._polls: dict[int, pb.RankPoll] = {}
        self._joins = 0
        self._pins: list[Head] = []
        self._effects: list[Effect] = []
        self._story: deque[str] = deque(maxlen=STORY_LINES)

    # --- what the shell asks -----------------------------------------------------------------------------------

    def position(self) -> Position:
        """The part of the state that hello and ask carry."""
        return Position(self.floor, self.head, self.voted, self.level, self.disk_head, self.progress)

    def greet(self) -> list[Up]:
        """First words on every new stream: the whole state, so that nothing depends on what was sent before."""
        hello = Hello(self.position(), self.group.address, self.group.group_world_size, self.adopted)
        return [hello, Ask(self.position(), self._leaving)] if self._asked else [hello]

    def in_force(self) -> bool:
        """True if there is a quorum under which this member may act."""
        return self.adopted is not None and self.adopted.id > self.floor and self.ended is None

    def story(self) -> list[str]:
        """The last decisions, one sentence each."""
        return list(self._story)

    def validate(self) -> None:
        """Raise AssertionError if the state breaks an invariant."""
        attempt = self._attempt
        assert attempt.step == self.head.step + 1, "the attempt is for the step after the head"
        if self.voted is not None:
            assert self.voted.step == attempt.step, "a vote is for the step after the head"
            assert self._held is not None, "who voted holds everything that applying needs"
        if attempt.voted:
            assert len(attempt.done) == self.group.group_world_size, "a yes needs the data of every rank"
            assert self.voted is not None, "voted is set before the yes is posted"

    # --- start, Lighthouse -------------------------------------------------------------------------------------

    def start(self) -> list[Effect]:
        """Everything is registered: ask for the first quorum."""
        self._ask()
        return self._take()

    def heard(self, now_ms: int) -> list[Effect]:
        """Something came from the Lighthouse: votes that rule M8 held back may be due."""
        return self._advance(now_ms)

    def form(self, quorum: Quorum, now_ms: int) -> list[Effect]:
        """Adopt a quorum (rule M5)."""
        rank = quorum.rank_of(self.group.process)
        newest = max(self.floor, self.adopted.id if self.adopted else 0)
        if rank is None or quorum.id <= newest or self.ended is not None:
            return self._take()
        if self.in_force():
            self._abort_lanes(newest, f"quorum {quorum.id} took its place")
        if not self._move_to_base(quorum):
            return self._take()
        self.adopted, self.replica_rank = quorum, rank
        self._asked = False
        others_hold = any(m.contributor and m.process != self.group.process for m in quorum.members)
        # Who stays because nobody else has the state (F35) lets the joiners fetch it, and does not end each quorum.
        self._change_wanted = self._leaving and others_hold
        self._hellos, self._configured, self._inbox, self._gone = {}, set(), {}, set()
        self._attempt = _Attempt(self.head.step + 1)
        self._note(f"adopted quorum {quorum.id} of {len(quorum.members)} as rank {rank}: {quorum.reason}")
        self._emit_quorum(quorum)
        if self._finished:
            self._leave_finished(quorum)
            return self._take()
        joiners = sum(not member.contributor for member in quorum.members)
        if self.level and joiners:
            self._pin(quorum.base, joiners)
        if len(quorum.members) >= self.group.min_replica_size:
            self._configure_deadline_ms = now_ms + self.timeouts.configure_ms
            self._effects.append(ConnectMesh(quorum))
        return self._take()

    def revoke(self, quorum_id: int, now: bool, reason: str) -> list[Effect]:
        """The Lighthouse wants this quorum to end (rule M4)."""
        if quorum_id <= self.floor:
            if self.adopted is None or self.adopted.id <= self.floor:
                self._ask()  # it may have lost the ask; an ask states and may be repeated
            return self._take()
        self._effects.append(Emit("revoked", {"quorum_id": quorum_id, "now": now, "reason": reason}))
        idle = self.adopted is None or len(self.adopted.members) < self.group.min_replica_size
        if now or idle or self._between_syncs() or self.adopted is None or self.adopted.id != quorum_id:
            self._fence(quorum_id, f"revoked: {reason}")
        else:
            self._change_wanted = True
        return self._take()

    def retired(self, reason: str, left: bool) -> list[Effect]:
        """The Lighthouse counts this process out for good."""
        if self.ended is None:
            self._end(reason)
            word = pb.Word(left=pb.WordLeft()) if left else words.fatal(f"this process was retired: {reason}")
            self._effects.append(Tell(word))
            self._effects.append(Emit("left" if left else "fatal", {"reason": reason}))
        return self._take()

    # --- the leaders' mesh ---------------------------------------------------------------------------------------

    def mesh_ready(
        self, quorum_id: int, hellos: Mapping[int, pb.PeerHello], layout_digest: str
    ) -> list[Effect]:
        """Connected to every other leader; ``hellos`` by replica rank, the own one included."""
        if self.adopted is None or not self._current(quorum_id):
            return self._take()
        for rank, hello in sorted(hellos.items()):
            if hello.layout_digest != layout_digest:
                return self._layout_differs(rank, hello)
        self._hellos = dict(hellos)
        quorum = self.adopted
        configure = pb.WordConfigure(
            quorum_id=quorum.id,
            replica_rank=self.replica_rank,
            replica_world_size=len(quorum.members),
            store_address=hellos[0].store_address,
            members=[member.process.replica_id for member in quorum.members],
            contributors=sum(member.contributor for member in quorum.members),
            base=from_head(quorum.base),
        )
        self._effects.append(Tell(pb.Word(configure=configure)))
        if not self.level and self._fetch_head is not None:
            self._effects.append(TellEach(self._donor_words(quorum, self._fetch_head)))
        return self._take()

    def mesh_failed(self, quorum_id: int, reason: str, peer_rank: int | None) -> list[Effect]:
        """The mesh of a quorum could not be built in time."""
        if self._current(quorum_id):
            self._fail(f"leaders' mesh: {reason}", peer_rank)
        return self._take()

    def peer_frame(self, quorum_id: int, rank: int, frame: pb.PeerFrame, now_ms: int) -> list[Effect]:
        """A frame from the leader of replica ``rank``."""
        body = frame.WhichOneof("body")
        if not self._current(quorum_id):
            if body == "fenced" and self.adopted is not None and self.adopted.id == quorum_id:
                self._gone.add(rank)  # it stopped like this group: when it disconnects, it is not to blame
            return self._take()
        if body == "block":
            here = self._round(frame.block.step, frame.block.round)
            if rank not in here.blocks:
                here.blocks[rank] = frame.block
                here.arrivals_ms.append(now_ms)
            self._answer_boundary()
        elif body == "vote":
            self._round(frame.vote.step, frame.vote.round).yes.add(rank)
        elif body == "fenced":
            self._peer_gone(rank, None)
        return self._advance(now_ms)

    def peer_lost(self, quorum_id: int, rank: int, reason: str) -> list[Effect]:
        """The connection to a leader broke."""
        if self.adopted is None or self.adopted.id != quorum_id or rank in self._gone:
            return self._take()
        if self.in_force():
            self._peer_gone(rank, reason)
        else:
            # A failed reduction came first and could name nobody; now the Lighthouse need not wait for its grace.
            self._gone.add(rank)
            self._effects.append(
                SendUp(Fault(quorum_id, self._name(rank), f"its connection broke: {reason}"))
            )
        return self._take()

    # --- ranks of the own group ------------------------------------------------------------------------------------

    def rank_configured(self, rank: int, report: pb.RankConfigured) -> list[Effect]:
        """A rank has built its lane, or could not."""
        if self._current(report.quorum_id):
            if report.failure:
                peer = report.peer_rank if report.peer_rank >= 0 else None
                self._fail(f"rank {rank} could not build its lane: {report.failure}", peer)
            else:
                self._configured.add(rank)
                if len(self._configured) == self.group.group_world_size:
                    self._configure_deadline_ms = None
        return self._take()

    def rank_posted(self, rank: int, report: pb.RankPosted, now_ms: int) -> list[Effect]:
        """A rank has posted all that it had to post in this attempt."""
        if self._is_current(report.attempt):
            self._attempt.posted[rank] = report
        return self._advance(now_ms)

    def rank_done(self, rank: int, report: pb.RankDone, now_ms: int) -> list[Effect]:
        """All operations of a rank have ended, well or not."""
        if not self._is_current(report.attempt):
            return self._take()
        if report.failure:
            peer = report.peer_rank if report.peer_rank >= 0 else None
            self._fail(f"reduction on rank {rank}: {report.failure}", peer)
        else:
            self._attempt.done.add(rank)
        return self._advance(now_ms)

    def rank_boundary(self, rank: int, report: pb.RankBoundary) -> list[Effect]:
        """A rank of a group that is behind stands before its next step; all go on together."""
        here = (report.epoch, report.step) == (self._joins, self.head.step)
        if here and report.visit > self._visits:
            self._boundary[rank] = report
            self._answer_boundary()
        return self._take()

    def rank_poll(self, rank: int, report: pb.RankPoll, now_ms: int) -> list[Effect]:
        """A rank asks between two inner steps whether the window ends here; all ranks get one answer."""
        self._polls[rank] = report
        polls = [poll for poll in self._polls.values() if poll.count == report.count]
        if len(polls) == self.group.group_world_size:
            due = any(poll.ready for poll in polls)
            due = due or self._awaited_by_peers(max(1, report.least_peers), now_ms - report.grace_ms)
            self._polls = {}
            self._effects.append(Tell(pb.Word(poll=pb.WordPoll(count=report.count, due=due))))
        return self._take()

    def rank_fetch_failed(self, rank: int, report: pb.RankFetchFailed) -> list[Effect]:
        """The state could not be fetched: start over at the base of the next quorum (rule M6).

        That one comes at the next step boundary: the others have done nothing wrong, and lose nothing.
        """
        if not self.level:
            self._fetch_failed = self._change_wanted = True
            self._note(f"rank {rank} could not fetch the state: {report.reason}")
        return self._take()

    def leave_wanted(self, idle: bool) -> list[Effect]:
        """Leave in good order: at the next boundary, or at once if the group is ``idle``: it will take no more steps."""
        self._leaving = self._change_wanted = True
        self._finished = self._finished or idle
        if idle and self.in_force() and self.adopted is not None:
            self._fence(self.adopted.id, "leaving")
        elif not self.in_force():
            self._ask()
        return self._take()

    def disk_saved(self, head: Head) -> list[Effect]:
        """A checkpoint of ``head`` is complete on disk."""
        self.disk_head = head
        self._ask_again()
        return self._take()

    # --- time --------------------------------------------------------------------------------------------------------

    def deadline_ms(self) -> int | None:
        """When ``tick`` has something to do, if nothing else happens."""
        if not self.in_force():
            return None
        times = [self._configure_deadline_ms, self._wait_deadline_ms()]
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: int) -> list[Effect]:
        """Deadlines of what others owe us."""
        if self.in_force():
            if self._configure_deadline_ms is not None and now_ms >= self._configure_deadline_ms:
                missing = sorted(set(range(self.group.group_world_size)) - self._configured)
                self._fail(f"lanes of ranks {missing} not built within {self.timeouts.configure_ms} ms", None)
            wait_deadline_ms = self._wait_deadline_ms()
            if wait_deadline_ms is not None and now_ms >= wait_deadline_ms:
                late = self._late_peer()
                name = self._name(late) if late is not None else "nobody known"
                self._fail(f"waited too long in step {self._attempt.step}, for {name}", late)
        return self._take()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _move_to_base(self, quorum: Quorum) -> bool:
        """Take the verdict of a quorum about the step in flight. False if this process cannot go on."""
        base, vote = quorum.base, self.voted
        if quorum.reload and not self.level and not same_head(self.head, base):
            self._end("total loss: this process holds no state, a restart loads the checkpoint")
            self._effects.append(Tell(words.fatal(self.ended or "")))
            self._effects.append(Emit("fatal", {"reason": self.ended}))
            return False
        if self._fetch_failed:
            self._join(base)
        elif same_head(self.head, base):
            self._retries += 1 if self._attempt.posted else 0
        elif vote and self._held and (vote.step, vote.quorum_id) == (base.step, base.quorum_id):
            self._note(f"rolls step {base.step} forward")
            self._commit(Head(base.step, base.quorum_id), self._held)
        else:
            self._join(base)
        self.voted, self._held = None, None
        return True

    def _between_syncs(self) -> bool:
        """In a window, and nothing of this group is posted: a change of membership costs nothing now (F36)."""
        return self.group.windowed and not self._attempt.posted

    def _awaited_by_peers(self, least: int = 1, since_ms: int | None = None) -> bool:
        """True if so many other groups have posted their part of the step after the head, no later than ``since_ms``."""
        arrivals_ms = self._round(self._attempt.step, self._attempt.round).arrivals_ms
        return len(arrivals_ms) >= least and (since_ms is None or arrivals_ms[least - 1] <= since_ms)

    def _answer_boundary(self) -> None:
        """Send the ranks of a group that is behind on, all together: to replay, or into a step without the state."""
        reports = self._boundary.values()
        if len(reports) < self.group.group_world_size:
            return
        replay = not self.level and all(report.fetched for report in reports) and not self._fetch_failed
        patient = any(report.patient for report in reports)
        if patient and not replay and not self._fetch_failed and not self._awaited_by_peers():
            return
        self._visits = max(report.visit for report in reports)
        self._boundary = {}
        if replay:
            self.level = True
            self._fetch_head = None
            self._ask_again()
            self._effects.append(Emit("level", {"step": self.head.step}))
            self._note(f"level at step {self.head.step}")
        self._effects.append(Tell(pb.Word(boundary=pb.WordBoundary(replay=replay))))

    def _leave_finished(self, quorum: Quorum) -> None:
        """In a quorum although this group takes no more steps: the ask that says so came too late, so ask again.

        If it is in one again, nobody else holds the state; but who does not step cannot bring anybody level either.
        """
        self._formed_when_finished += 1
        if self._formed_when_finished == 1:
            self._fence(quorum.id, "this group has finished")
        else:
            self._end("this group has finished")
            self._effects.append(Tell(pb.Word(left=pb.WordLeft())))
            self._effects.append(Emit("left", {"reason": self.ended}))

    def _join(self, base: Head) -> None:
        """Become a joiner at ``base``: own step and saved gradients are dropped (rules M5, M6)."""
        self._note(f"behind: joins at step {base.step} of quorum {base.quorum_id}, was at {self.head}")
        if self._attempt.posted:
            reason = f"this group was left behind at step {self.head.step}"
            self._effects.append(Emit("refused", {"step": self._attempt.step, "reason": reason}))
        self.level, self.head = False, base
        self._fetch_head, self._fetch_failed = base, False
        self._boundary, self._retries = {}, 0
        self._joins += 1
        self._effects.append(Tell(pb.Word(join=pb.WordJoin(head=from_head(base), epoch=self._joins))))
        self._effects.append(Emit("behind", {"base_step": base.step}))

    def _donor_words(self, quorum: Quorum, head: Head) -> tuple[pb.Word, ...]:
        donors = [self._hellos[rank] for rank, member in enumerate(quorum.members) if member.contributor]
        return tuple(
            pb.Word(
                donors=pb.WordDonors(
                    head=from_head(head),
                    addresses=[d.state_addresses[rank] for d in donors if rank < len(d.state_addresses)],
                )
            )
            for rank in range(self.group.group_world_size)
        )

    def _layout_differs(self, rank: int, hello: pb.PeerHello) -> list[Effect]:
        assert self.adopted is not None
        theirs, ours = self.adopted.members[rank], self.adopted.members[self.replica_rank]
        reason = (
            f"model, optimizer flags or buckets of {hello.replica_id} ({hello.layout_digest}) differ from ours: "
            "start every replica group from the same configuration"
        )
        if (theirs.contributor, -rank) > (ours.contributor, -self.replica_rank):
            self._end(reason)
            self._effects.append(Tell(words.fatal(reason)))
            self._effects.append(Emit("fatal", {"reason": reason}))
        else:
            self._fail(reason, rank)
        return self._take()

    def _advance(self, now_ms: int) -> list[Effect]:
        """Do whatever has become possible in the current attempt; nothing is decided in an outage (rule M8)."""
        if self.in_force():
            self._send_block(now_ms)
            if self._outage(now_ms):
                return self._take()
            if self._data_complete():
                self._vote(now_ms)
            if self._attempt.voted:
                self._finish()
        return self._take()

    def _send_block(self, now_ms: int) -> None:
        attempt = self._attempt
        if attempt.block_sent or len(attempt.posted) < self.group.group_world_size:
            return
        assert self.adopted is not None
        reports = [attempt.posted[rank] for rank in sorted(attempt.posted)]
        positions: dict[str, int] = {}
        for report in reports:
            positions.update(report.positions)
        attempt.objects = any(report.objects for report in reports)
        outvoted = attempt.objects and any(report.weight > 0 for report in reports)
        block = pb.ControlBlock(
            quorum_id=self.adopted.id,
            step=attempt.step,
            round=attempt.round,
            head=from_head(self.head),
            weight=reports[0].weight if self.level and not attempt.objects else 0.0,
            stale=outvoted or any(report.stale for report in reports),
            finite=all(report.finite for report in reports),
            change_wanted=self._change_wanted,
            scalars=merge_scalars([report.scalars for report in reports]),
            positions=positions,
        )
        attempt.block_sent = True
        attempt.waiting_since_ms = now_ms
        self._round(attempt.step, attempt.round).blocks[self.replica_rank] = block
        self._effects.append(SendPeers(self.adopted.id, pb.PeerFrame(block=block)))

    def _data_complete(self) -> bool:
        assert self.adopted is not None
        attempt = self._attempt
        blocks = self._round(attempt.step, attempt.round).blocks
        return (
            not attempt.voted
            and len(attempt.done) == self.group.group_world_size
            and len(blocks) == len(self.adopted.members)
        )

    def _vote(self, now_ms: int) -> None:
        """All data is here: check it, note the vote, then post the yes (rule M2)."""
        assert self.adopted is not None
        quorum, attempt = self.adopted, self._attempt
        received = self._round(attempt.step, attempt.round).blocks
        blocks = [received[rank] for rank in range(len(quorum.members))]
        stranger = wrong_head(blocks, self.head)
        if stranger is not None:
            self._fail(f"{self._name(stranger)} contributed at another head", stranger)
            return
        summary = summarise(blocks)
        if summary.stale:
            self._again()
            return
        self.voted, self._held = Vote(attempt.step, quorum.id), summary
        attempt.voted = True
        attempt.waiting_since_ms = now_ms
        self._round(attempt.step, attempt.round).yes.add(self.replica_rank)
        vote = pb.PeerVote(quorum_id=quorum.id, step=attempt.step, round=attempt.round)
        self._effects.append(SendPeers(quorum.id, pb.PeerFrame(vote=vote)))

    def _again(self) -> None:
        """Somebody's data was stale: the same step, the same quorum, everything once more."""
        assert self.adopted is not None
        step, round_, objects = self._attempt.step, self._attempt.round + 1, self._attempt.objects
        self._attempt = _Attempt(step, round_)
        attempt = pb.Attempt(quorum_id=self.adopted.id, step=step, round=round_)
        self._effects.append(Tell(pb.Word(again=pb.WordAgain(attempt=attempt, objects=objects))))

    def _finish(self) -> None:
        """Commit when every member has said yes (rule M3)."""
        assert self.adopted is not None and self._held is not None
        quorum, summary = self.adopted, self._held
        if len(self._round(self._attempt.step, self._attempt.round).yes) < len(quorum.members):
            return
        self._commit(Head(self._attempt.step, quorum.id), summary)
        if summary.change_wanted:
            self._fence(quorum.id, "membership changes at this boundary")
        elif self._gone:
            self._fail(f"{self._name(min(self._gone))} left after its vote", min(self._gone))

    def _commit(self, head: Head, summary: Summary) -> None:
        block = self._round(self._attempt.step, self._attempt.round).blocks.get(self.replica_rank)
        contributed = block is not None and block.weight > 0
        self._change_wanted = self._change_wanted or (self._leaving and summary.contributors > contributed)
        self.head, self.voted, self._held = head, None, None
        word = pb.WordCommit(
            head=from_head(head),
            skip=summary.skip,
            total_weight=summary.total_weight,
            contributors=summary.contributors,
            contributed=contributed,
            scalars=summary.scalars,
            positions=summary.positions,
            leaving=self._leaving and summary.change_wanted,
            retries=self._retries,
        )
        self._effects.append(Tell(pb.Word(commit=word)))
        self._emit_commit(head, summary, contributed)
        self._retries = 0
        self._inbox = {key: value for key, value in self._inbox.items() if key[0] > head.step}
        self._attempt = _Attempt(head.step + 1)
        if self._pins and self.adopted and summary.contributors == len(self.adopted.members):
            self._unpin(keep=0)

    def _peer_gone(self, rank: int, lost: str | None) -> None:
        """A peer fenced (``lost`` is None) or its connection broke."""
        self._gone.add(rank)
        attempt = self._attempt
        has_yes = rank in self._round(attempt.step, attempt.round).yes
        if attempt.voted and has_yes:
            return  # its yes counts; the others' may still complete the step
        if lost is not None:
            self._fail(f"connection to {self._name(rank)} broke: {lost}", rank)
            return
        if attempt.voted:
            self.voted, self._held = None, None  # a known no: nobody can commit
        assert self.adopted is not None
        self._fence(self.adopted.id, f"{self._name(rank)} stopped")

    def _fail(self, reason: str, peer_rank: int | None) -> None:
        """This quorum failed here: tell the Lighthouse, and be free for the next."""
        assert self.adopted is not None
        peer = self._name(peer_rank) if peer_rank is not None else None
        quorum_id = self.adopted.id
        self._effects.append(Emit("fault", {"quorum_id": quorum_id, "peer": peer, "reason": reason}))
        self._effects.append(SendUp(Fault(quorum_id, peer, reason)))
        self._fence(quorum_id, reason)

    def _fence(self, quorum_id: int, reason: str) -> None:
        """Promise never to act at or below ``quorum_id`` again, and ask at once (rule M4)."""
        self._note(f"fenced at {quorum_id}: {reason}")
        if self.in_force() and self.adopted is not None and self.adopted.id <= quorum_id:
            self._abort_lanes(self.adopted.id, reason)
        self.floor = max(self.floor, quorum_id)
        self._configure_deadline_ms = None
        self._attempt.voted = False
        self._ask()

    def _abort_lanes(self, quorum_id: int, reason: str) -> None:
        fenced = pb.PeerFrame(fenced=pb.PeerFenced(quorum_id=quorum_id))
        self._effects.append(SendPeers(quorum_id, fenced))
        self._effects.append(Tell(pb.Word(abort=pb.WordAbort(quorum_id=quorum_id, reason=reason))))

    def _ask(self) -> None:
        self._asked = True
        self._effects.append(SendUp(Ask(self.position(), self._leaving)))

    def _ask_again(self) -> None:
        """What the standing ask says about the state that this process holds has changed for the better."""
        if self._asked:
            self._ask()

    def _pin(self, head: Head, readers: int) -> None:
        """Keep ``head`` readable until everybody is level. Older pins stay: a joiner goes on with what it began (F31)."""
        if head not in self._pins:
            self._unpin(keep=MAX_PINS - 1)
            self._pins.append(head)
            self._effects.append(
                Tell(pb.Word(pin=pb.WordPin(head=from_head(head), on=True, readers=readers)))
            )

    def _unpin(self, keep: int) -> None:
        while len(self._pins) > keep:
            head = self._pins.pop(0)
            self._effects.append(Tell(pb.Word(pin=pb.WordPin(head=from_head(head), on=False))))

    def _end(self, reason: str) -> None:
        self._note(f"ended: {reason}")
        if self.adopted is not None and self.in_force():
            self._abort_lanes(self.adopted.id, reason)
        self.ended = reason

    def _outage(self, now_ms: int) -> bool:
        """True if the Lighthouse may have counted this process out: no votes and no commits then (rule M8)."""
        heard_ms = self.last_heard_ms
        return heard_ms is not None and now_ms - heard_ms > self.timeouts.outage_limit_ms

    def _wait_deadline_ms(self) -> int | None:
        attempt = self._attempt
        if attempt.waiting_since_ms is None or not self.in_force():
            return None
        limit_ms = self.timeouts.vote_ms if attempt.voted else self.timeouts.timeout_ms
        return attempt.waiting_since_ms + limit_ms

    def _late_peer(self) -> int | None:
        assert self.adopted is not None
        here = self._round(self._attempt.step, self._attempt.round)
        seen = here.yes if self._attempt.voted else set(here.blocks)
        late = sorted(set(range(len(self.adopted.members))) - seen - {self.replica_rank})
        return late[0] if late else None

    def _current(self, quorum_id: int) -> bool:
        return self.in_force() and self.adopted is not None and self.adopted.id == quorum_id

    def _is_current(self, attempt: pb.Attempt) -> bool:
        here = (self._attempt.step, self._attempt.round)
        return self._current(attempt.quorum_id) and (attempt.step, attempt.round) == here

    def _round(self, step: int, round_: int) -> _Round:
        return self._inbox.setdefault((step, round_), _Round())

    def _name(self, rank: int) -> str:
        assert self.adopted is not None
        return self.adopted.members[rank].process.replica_id

    def _note(self, sentence: str) -> None:
        self._story.append(sentence)

    def _emit_quorum(self, quorum: Quorum) -> None:
        fields = {
            "quorum_id": quorum.id,
            "replica_rank": self.replica_rank,
            "members": [member.process.replica_id for member in quorum.members],
            "base_step": quorum.base.step,
            "level": self.level,
            "reason": quorum.reason,
        }
        self._effects.append(Emit("quorum", fields))

    def _emit_commit(self, head: Head, summary: Summary, contributed: bool) -> None:
        if summary.skip:
            self._effects.append(Emit("skip", {"step": head.step}))
        fields = {
            "step": head.step,
            "quorum_id": head.quorum_id,
            "contributors": summary.contributors,
            "contributed": contributed,
            "retries": self._retries,
            "scalars": summary.scalars,
        }
        self._effects.append(Emit("commit", fields))

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
