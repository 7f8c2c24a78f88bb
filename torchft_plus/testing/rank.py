"""One rank of a simulated group: the habits of ``StepLoop``, ``Desk``, ``LaneBuilder``, ``Fetcher`` and ``Manager``.

The training thread is a generator: it yields ``WAIT`` to wait for its mailbox, a number to compute for so many
milliseconds, and a string to meet the group's other ranks in a collective of that name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

from lighthouse.messages import Head, Progress
from torchft_plus.manager.control_words import to_head
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.semi_sync.schedule import Schedule
from torchft_plus.testing.collective import Operation, Seat
from torchft_plus.testing.content import Gradient, State, next_content, positions_of
from torchft_plus.testing.donors import Fetch, Server
from torchft_plus.testing.network import Life

if TYPE_CHECKING:
    from torchft_plus.testing.group import Group

WAIT = object()
Training = Generator[object, None, None]


class Outcome:
    """How a step ended on this rank: what ``StepOutcome`` says, as far as the simulation needs it."""

    __slots__ = ("attempt", "contributed", "head", "kind", "positions", "result", "total_weight")

    def __init__(
        self,
        kind: str,
        head: Head,
        positions: dict[str, int] | None = None,
        result: tuple[Gradient, ...] = (),
        total_weight: float = 0.0,
        contributed: bool = False,
        attempt: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.kind, self.head, self.positions = kind, head, positions or {}
        self.result, self.total_weight, self.contributed = result, total_weight, contributed
        self.attempt = attempt
        """Quorum, step and round of its data."""


class Rank:
    """One rank process: agent thread's desk, lane builder, fetcher, state server, and the training thread."""

    def __init__(self, group: Group, index: int, life: Life, head: Head, state: State) -> None:
        self.group = group
        self.world = group.world
        self.index = index
        self.life = life
        self.name = f"{group.process.replica_id}.{index}"
        # training thread
        self.head = head
        self.content: str | None = state.content
        """None: being overwritten by a fetch."""
        self.positions = dict(state.positions)
        self.behind = False
        self.leaving = False
        self.asked_to_go_ms = 0
        """When it was told to leave after the step: it waits for an answer for so long."""
        self.quorum: pb.WordConfigure | None = None
        self.phase, self.counter = "start", 0
        self.stall_ms = 0
        """A slow rank: the next step's computing takes so much longer."""
        self.objects = False
        """Something goes wrong locally in the next step (``report_error``)."""
        self._positions_since_join: dict[str, int] = {}
        self._recorded: list[tuple[Gradient, ...]] = []
        self._join_epoch = 0
        self._visits = 0
        self._round = 0
        self._posted: tuple[int, int] | None = None
        self._operation: Operation | None = None
        self._reported = False
        self._weight = 1.0
        settings = self.world.settings
        self._schedule = Schedule(settings.fragments * max(1, settings.window), settings.fragments)
        self._joined = False
        """It became level between two syncs of the others: the window ends when they come to theirs."""
        self._gradient: Gradient | None = None
        self._objection = False
        self._updating = False
        self._mailbox: deque[pb.Word] = deque()
        self._waiting = False
        self._training: Training = self._train()
        # agent, builder and fetch threads
        self.server = Server(lambda: State(self.content or "torn", positions_of(self.positions)))
        self.address = f"state/{group.process}/{index}"
        group.directory.add(self.address, life, self.server)
        self._seat: Seat | None = None
        self._seat_quorum = 0
        self._wanted = 0
        self._fenced = 0
        self._fetch: Fetch | None = None
        self._fetched: State | None = None
        self._fetch_torn = False

    def start(self) -> None:
        """Enter training."""
        self._resume()

    # --- the agent thread's side: Desk, LaneBuilder, Fetcher ---------------------------------------------------------

    def deliver(self, word: pb.Word) -> None:
        """A word of the leader arrives in the agent thread of this rank."""
        body = word.WhichOneof("body")
        if body == "configure":
            self._configure(word.configure)
            self._put(word)
        elif body == "abort":
            self._fenced = max(self._fenced, word.abort.quorum_id)
            if self._seat is not None and self._seat_quorum <= word.abort.quorum_id:
                self._seat.abort(word.abort.reason)
            self._wake()
        elif body == "pin":
            head = to_head(word.pin.head)
            (self.server.pin if word.pin.on else self.server.unpin)(head)
            self._wake()
        else:
            self._put(word)

    def _configure(self, word: pb.WordConfigure) -> None:
        self._wanted = word.quorum_id
        if self._seat is not None:
            self._seat.abort("retired")
        self._seat = None
        quorum_id = word.quorum_id

        def built(failure: str | None, peer_rank: int | None) -> None:
            self.life.after(self.world.between((0, 2)), self._built, quorum_id, seat, failure, peer_rank)

        seat = self.group.collectives.join(
            quorum_id, self.index, word.replica_world_size, self.life, word.replica_rank, built
        )

    def _built(self, quorum_id: int, seat: Seat, failure: str | None, peer_rank: int | None) -> None:
        if failure is None:
            if quorum_id != self._wanted or quorum_id <= self._fenced:
                seat.abort("retired")
                return
            self._seat, self._seat_quorum = seat, quorum_id
        report = pb.RankConfigured(
            quorum_id=quorum_id, failure=failure or "", peer_rank=-1 if peer_rank is None else peer_rank
        )
        self._report(pb.RankFrame(configured=report))
        self._wake()

    def _start_fetch(self, head: Head, donors: list[str]) -> None:
        running = self._fetch
        if running is not None and running.head == head:
            running.donors = donors
            return
        self._reset_fetch()
        self._fetch = Fetch(
            self.world, self.group.directory, self.life, head, donors, self._first_byte, self._fetch_ended
        )

    def _first_byte(self, donor: str) -> None:
        """The fetch writes into live tensors from now on."""
        self.group.transfer_began(donor)
        self.content, self._fetch_torn = None, self._fetch_torn or self._updating

    def _fetch_ended(self, fetch: Fetch, state: State | None, reason: str) -> None:
        if state is None and fetch.donors != fetch.tried:
            fetch.again()
        elif state is None:
            self._fetch = None
            self._report(pb.RankFrame(fetch_failed=pb.RankFetchFailed(reason=reason)))
        else:
            self._fetched = State("torn", state.positions) if self._fetch_torn else state
            self._wake()

    def _reset_fetch(self) -> None:
        if self._fetch is not None:
            self._fetch.cancelled = True
        self._fetch, self._fetched, self._fetch_torn = None, None, False

    def _report(self, frame: pb.RankFrame) -> None:
        self.group.report(self.index, frame)

    # --- mailbox -------------------------------------------------------------------------------------------------------

    def _put(self, word: pb.Word) -> None:
        self._mailbox.append(word)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting = False
            self.life.after(self.world.between((0, 1)), self._resume)

    def _resume(self) -> None:
        """Run the training thread until it waits."""
        try:
            request = next(self._training)
        except StopIteration:
            return
        if request is WAIT:
            self._waiting = True
        elif isinstance(request, str):
            self.group.meet(self.index, request)
        elif isinstance(request, int):
            self.life.after(request, self._resume)

    def met(self) -> None:
        """All ranks of the group have come to the same collective."""
        self.life.after(self.world.between((0, 1)), self._resume)

    # --- the training thread: Manager ------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """What a heartbeat says."""
        return Progress(self.head.step, self.phase, self.counter)

    def _touch(self, phase: str) -> None:
        self.phase = phase
        self.counter += 1

    def _train(self) -> Training:
        self._touch("start")
        self._report(
            pb.RankFrame(ready=pb.RankReady(initial_digest=self.content or "", state_address=self.address))
        )
        yield from self._wait_first_quorum()
        while True:
            self._touch("start")
            if self.leaving and (yield from self._may_leave()):
                self.group.oracle.leaves(self)
                self._leave()
                return
            if self.behind and (yield from self._boundary()):
                self._replay()
                self._joined = True
            self._begin()
            self._touch("compute")
            yield from self._compute()
            self._touch("reduce")
            outcome = yield from self._finish()
            self._touch("apply")
            yield from self._apply(outcome)
            self.group.outcome(self, outcome)

    def _wait_first_quorum(self) -> Training:
        while self.quorum is None:
            if not self._mailbox:
                yield from self._wait()
            elif self._handle(self._mailbox.popleft()) is not None:
                self._gradient = None

    def _boundary(self) -> Generator[object, None, bool]:
        self._visits += 1
        reported = self._report_boundary()
        while True:
            if not self._mailbox:
                if self.world.settings.window and self._fetched is not None and not reported:
                    reported = self._report_boundary()
                yield from self._wait()
                continue
            word = self._mailbox.popleft()
            if word.WhichOneof("body") == "boundary":
                self.behind = not word.boundary.replay
                return word.boundary.replay
            if self._handle(word) is not None:
                reported = self._report_boundary()

    def _report_boundary(self) -> bool:
        """Says whether the state was there."""
        boundary = pb.RankBoundary(
            fetched=self._fetched is not None,
            epoch=self._join_epoch,
            step=self.head.step,
            patient=self.world.settings.window > 0,
            visit=self._visits,
        )
        self._report(pb.RankFrame(boundary=boundary))
        return boundary.fetched

    def _replay(self) -> None:
        state = self._fetched
        assert state is not None, "boundary said that the state is here"
        content = state.content
        for gradients in self._recorded:
            content = next_content(content, gradients)
        self.content = content
        self.positions = {**dict(state.positions), **self._positions_since_join}
        self._recorded, self._positions_since_join = [], {}
        self._reset_fetch()
        self.world.trace(self.name, "replayed to {}", self.head)
        self.group.oracle.stands(self)

    def _begin(self) -> None:
        self._weight = 0.0 if self.behind else 1.0
        self._posted, self._operation, self._reported, self._objection = None, None, False, False
        while self._mailbox and self._mailbox[0].WhichOneof("body") == "configure":
            self._handle(self._mailbox.popleft())
        if not self.behind:
            self.server.publish(self.head)
            self.group.save(self)

    def _compute(self) -> Training:
        self._gradient = None
        if self.behind:
            return
        if self.group.ranks_count > 1:
            yield "forward"
        stall_ms, self.stall_ms = self.stall_ms, 0
        yield self.world.between(self.world.settings.compute_ms) + stall_ms
        if self.world.settings.window and not (yield from self._rest_of_window()):
            self._weight = 0.0
        replica_id = self.group.process.replica_id
        batch = self.positions.get(replica_id, 0)
        self._gradient = Gradient(replica_id, batch, self.content or "torn", self.index, self._fragment())
        self._objection, self.objects = self.objects, False
        self.group.oracle.computed(self, self._gradient)

    def _fragment(self) -> int:
        """Whose turn it is: a function of the head (F36)."""
        return self._schedule.fragment(self.head.step)

    def _rest_of_window(self) -> Generator[object, None, bool]:
        """The other inner steps of a window (``OuterLoop``); False if it was not a whole one."""
        joined, self._joined = self._joined, False
        for inner in range(1, self._schedule.window):
            self._touch("compute")
            self.server.publish(self.head)
            if joined and (yield from self._is_due(inner)):
                return False
            if self.group.ranks_count > 1:
                yield "forward"
            yield self.world.between(self.world.settings.compute_ms)
        return True

    def _is_due(self, inner_steps: int) -> Generator[object, None, bool]:
        self._report(pb.RankFrame(poll=pb.RankPoll(count=inner_steps)))
        while True:
            for word in self._mailbox:
                if word.WhichOneof("body") == "poll" and word.poll.count == inner_steps:
                    self._mailbox.remove(word)
                    return word.poll.due
            yield from self._wait()

    # --- the training thread: StepLoop -------------------------------------------------------------------------------------

    def _finish(self) -> Generator[object, None, Outcome]:
        while True:
            if self._mailbox:
                outcome = self._handle(self._mailbox.popleft())
                if outcome is not None:
                    return outcome
                continue
            if not self.behind:
                self.server.publish(self.head)
            seat = self._usable_seat()
            if seat is not None and self._posted != (self._seat_quorum, self._round):
                self._post(seat)
            elif self._operation is not None and self._operation.ended and not self._reported:
                self._report_done()
            else:
                yield from self._wait()

    def _wait(self) -> Training:
        yield WAIT

    def _usable_seat(self) -> Seat | None:
        seat = self._seat
        usable = seat is not None and self._seat_quorum > self._fenced and seat.failed is None
        told = self.quorum is not None and self.quorum.quorum_id == self._seat_quorum
        return seat if usable and told else None

    def _post(self, seat: Seat) -> None:
        key = (self._seat_quorum, self._round)
        if self._objection and self._posted is not None:
            self._gradient, self._weight = None, 0.0
        stale = (self._objection and self._weight > 0) or (self._round == 0 and self.group.is_stale(self))
        finite = not self.group.is_not_finite(self)
        harmful = self._weight > 0 and not finite
        self.group.oracle.posted((key[0], self.head.step + 1, key[1]), stale, not harmful)
        positions = {} if self._gradient is None else {self._gradient.replica_id: self._gradient.batch + 1}
        report = pb.RankPosted(
            attempt=self._attempt(key),
            stale=stale,
            finite=finite,
            weight=self._weight,
            positions=positions,
            objects=self._objection,
        )
        self._posted, self._reported = key, False
        self._report(pb.RankFrame(posted=report))
        gradient = self._gradient if self._weight > 0 else None
        self._operation = seat.post((self.head.step + 1, self._round), gradient, self._wake)

    def _report_done(self) -> None:
        assert self._operation is not None and self._posted is not None
        error, peer = self._operation.error, self._operation.peer_rank
        done = pb.RankDone(
            attempt=self._attempt(self._posted), failure=error or "", peer_rank=-1 if peer is None else peer
        )
        self._reported = True
        self._report(pb.RankFrame(done=done))

    def _attempt(self, key: tuple[int, int]) -> pb.Attempt:
        return pb.Attempt(quorum_id=key[0], step=self.head.step + 1, round=key[1])

    def _handle(self, word: pb.Word) -> Outcome | None:
        body = word.WhichOneof("body")
        if body == "configure":
            self.quorum, self._round = word.configure, 0
        elif body == "again":
            self._round = word.again.attempt.round
            self._objection = self._objection or word.again.objects
        elif body == "commit":
            return self._commit(word.commit)
        elif body == "join":
            self.server.withdraw()
            self._reset_fetch()
            self._recorded, self._positions_since_join = [], {}
            self.behind, self.head, self._join_epoch = True, to_head(word.join.head), word.join.epoch
            return Outcome("refused", self.head)
        elif body == "donors":
            self._start_fetch(to_head(word.donors.head), list(word.donors.addresses))
        elif body == "left":
            self.group.end(0, "left in good order")
        elif body == "fatal":
            self.group.end(1, word.fatal.reason)
        return None

    def _commit(self, word: pb.WordCommit) -> Outcome:
        operation = self._operation
        assert operation is not None and operation.ended and operation.error is None, (
            f"{self.name} is told to commit {word.head} without having its data"
        )
        assert self._posted is not None
        self.head = to_head(word.head)
        self._round = 0
        attempt = (self._posted[0], self.head.step, self._posted[1])
        self.leaving = word.leaving
        self.asked_to_go_ms = self.life.now_ms
        self.server.before_update()
        kind = "skipped" if word.skip else "applied"
        positions, contributed = dict(word.positions), word.contributed
        return Outcome(kind, self.head, positions, operation.result, word.total_weight, contributed, attempt)

    def _apply(self, outcome: Outcome) -> Training:
        if outcome.kind == "refused":
            self.group.oracle.refused(self, self._gradient)
            return
        self.positions.update(outcome.positions)
        if self.behind:
            self._positions_since_join.update(outcome.positions)
            if outcome.kind == "applied":
                self._recorded.append(outcome.result)
        elif outcome.kind == "applied":
            content, self._updating = self.content, True
            yield self.world.between(self.world.settings.apply_ms)
            self._updating = False
            if self.content is None or self.content != content:
                self._fetch_torn = True  # a fetch wrote into the tensors that the optimizer just changed
            else:
                self.content = next_content(self.content, outcome.result)
        self.group.oracle.applied(self, outcome)

    def _may_leave(self) -> Generator[object, None, bool]:
        self.leaving = False
        deadline_ms = self.asked_to_go_ms + self.world.settings.timeouts.shutdown_ms
        while self.life.now_ms < deadline_ms:
            if not self._mailbox:
                yield 10
                continue
            word = self._mailbox.popleft()
            if word.WhichOneof("body") == "left":
                return True
            self._handle(word)
            if word.WhichOneof("body") == "configure":
                return False
        return True

    def _leave(self) -> None:
        """``Manager.shutdown``."""
        if self.index == 0:
            self.group.leave_idle()
        self.group.rank_left(self.index)
