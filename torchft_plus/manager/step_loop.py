"""The training thread's side of a step: posts data, waits, and does what the leader's word says.

Everything on which ranks of a group could part ways is decided by words, and words that change the course are taken
only in ``finish`` (or in ``start`` while behind, where all ranks go in lock-step).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from lighthouse.messages import Head
from torchft_plus.manager.agent import Agent
from torchft_plus.manager.control_words import to_head
from torchft_plus.manager.fetcher import Fetcher
from torchft_plus.manager.lanes import LaneBuilder
from torchft_plus.manager.mailbox import Mailbox
from torchft_plus.manager.outcome import Left, ManagerError, StepOutcome
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.process_group.lane import Lane, LaneError, Operation
from torchft_plus.reduce.reduction import Reduction
from torchft_plus.state.catch_up import CatchUp
from torchft_plus.state.server import StateServer

logger = logging.getLogger(__name__)

WAIT_SLICE_MS = 1_000
"""The waits of a step are ended by the core's deadlines; between two looks at the agent's health passes this long."""


class _Running:
    """The operations of one attempt; reports that all have ended well, or that one has failed, once.

    It reports from the thread that ended the operation: the training thread need not wake up for it.
    """

    def __init__(
        self, operations: tuple[Operation, ...], attempt: pb.Attempt, report: Callable[[pb.RankFrame], None]
    ) -> None:
        self._attempt = attempt
        self._report = report
        self._left = len(operations)
        self._reported = False
        self._lock = threading.Lock()
        if not operations:
            self._report_done(None)
        for operation in operations:
            operation.add_done_callback(partial(self._ended, operation))

    def _ended(self, operation: Operation) -> None:
        failure = operation.error
        with self._lock:
            self._left -= 1
            if self._reported or (self._left > 0 and failure is None):
                return
            self._reported = True
        self._report_done(failure)

    def _report_done(self, failure: LaneError | None) -> None:
        done = pb.RankDone(
            attempt=self._attempt,
            failure="" if failure is None else (str(failure) or "failed"),
            peer_rank=-1 if failure is None or failure.peer_rank is None else failure.peer_rank,
        )
        self._report(pb.RankFrame(done=done))


class StepLoop:
    """Runs steps of one rank. All methods are for the training thread."""

    def __init__(
        self,
        agent: Agent,
        mailbox: Mailbox,
        lanes: LaneBuilder,
        fetcher: Fetcher,
        catch_up: CatchUp,
        server: StateServer,
    ) -> None:
        self._agent = agent
        self._mailbox = mailbox
        self._lanes = lanes
        self._fetcher = fetcher
        self._catch_up = catch_up
        self._server = server
        self.head = Head()
        self.behind = False
        self.leaving = False
        """The quorum was given up in order to leave: see ``may_leave`` before the next step."""
        self.quorum: pb.WordConfigure | None = None
        """The adopted quorum, as far as this thread has been told."""
        self.reductions: list[Reduction] = []
        self._join_epoch = 0
        self._visits = 0
        self._round = 0
        self._posted: tuple[int, int] | None = None
        self._told_broken: tuple[int, int] | None = None
        self._begun_on: int | None = None
        self._objection: str | None = None
        self._weight = 1.0
        self._scalars: Mapping[str, float] = {}
        self._positions: Mapping[str, int] = {}

    # --- start ---------------------------------------------------------------------------------------------------

    def wait_first_quorum(self, timeout_s: float | None = None) -> None:
        """Block until this group is in a quorum, and know whether it is behind. Nothing else may be computed before.

        Args:
            timeout_s: how long at most; None: for ever.

        Raises:
            TimeoutError: there was none; waiting may go on.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.quorum is None:
            mark = self._mailbox.mark()
            word = self._mailbox.take()
            if word is None:
                left_ms = WAIT_SLICE_MS if end_s is None else round(1_000 * (end_s - time.monotonic()))
                if left_ms < 0:
                    raise TimeoutError(f"there was no quorum within {timeout_s} s")
                self._wait(mark, min(WAIT_SLICE_MS, left_ms))
            elif self._handle(word) is not None:
                self._drop_inputs()

    def boundary(self, wait_for_state: bool, patient: bool = False) -> bool:
        """While behind: stand before the next step together with the group's other ranks.

        Args:
            wait_for_state: stay until the state has arrived, and let the others wait: for states that recorded
                steps cannot bring up to date.
            patient: stay until the state has arrived or the others have posted their part of the step.

        Returns:
            True if every rank holds the fetched state, and the queue is to be replayed now.
        """
        self._visits += 1
        reported: bool | None = None
        while True:
            mark = self._mailbox.mark()
            word = self._mailbox.take()
            if word is None:
                # After a failed fetch the step is taken without state; the next quorum begins the fetch anew.
                fetch_ended = self._fetcher.report is not None or self._fetcher.failed
                due = reported is None or (patient and fetch_ended and not reported)
                if due and (fetch_ended or not wait_for_state):
                    reported = fetch_ended
                    self._report_boundary(patient)
                else:
                    self._wait(mark)
            elif word.WhichOneof("body") == "boundary":
                self.behind = not word.boundary.replay
                return word.boundary.replay
            elif self._handle(word) is not None:
                reported = None

    def begin(self, weight: float) -> None:
        """A step starts. If the lane is there, data is posted while it is computed."""
        self._posted, self._objection = None, None
        if not self.behind:
            self._server.publish(self.head)
        self._begin_reductions(weight)

    def _begin_reductions(self, weight: float) -> Lane | None:
        self._weight = 0.0 if self.behind else weight
        while (word := self._mailbox.take_if("configure")) is not None:
            self._handle(word)
        lane = self._usable_lane() if self._round == 0 else None
        self._begun_on = None if lane is None else lane.spec.quorum_id
        for reduction in self.reductions:
            reduction.begin(lane, self._weight)
        return lane

    def await_lane(self) -> None:
        """Within a step that has posted nothing: wait until the quorum's lane is built, or will not be.

        For results that the caller looks at before ``finish``: replicas that were given a result and replicas that were not
        would make different things of it (clip it, say), and only some would be told.
        """
        while self._begun_on is None and self._round == 0:
            mark = self._mailbox.mark()
            may_come = self.quorum is not None and self._lanes.is_building(self.quorum.quorum_id)
            if self._begin_reductions(self._weight) is None and may_come:
                self._wait(mark)
            elif not may_come:
                break

    def launch(self, weight: float) -> None:
        """The inputs of a window are complete, and its weight is known: post now what ``finish`` would, if there is a lane."""
        lane = self._begin_reductions(0.0 if self._objection is not None else weight)
        if lane is not None:
            for reduction in self.reductions:
                reduction.post(lane)

    def poll(self, count: int, ready: bool, least_peers: int, grace_ms: int, timeout_ms: int) -> bool:
        """Between two inner steps: does the window end here? The same answer on every rank of this group.

        Args:
            count: inner steps of this window.
            ready: this rank wants it to end.
            least_peers: so many other groups must wait at the sync,
            grace_ms: for so long, to end it otherwise.
            timeout_ms: in which the group's other ranks have to come to the same inner step.

        Raises:
            ManagerError: they did not.
        """
        poll = pb.RankPoll(count=count, ready=ready, least_peers=least_peers, grace_ms=grace_ms)
        self._agent.report(pb.RankFrame(poll=poll))
        end = time.monotonic() + timeout_ms / 1000
        while True:
            mark = self._mailbox.mark()
            word = self._mailbox.take_first("poll")
            if word is None:
                if time.monotonic() >= end:
                    raise ManagerError(
                        f"not all ranks of this group came to inner step {count} within {timeout_ms} ms: one of them "
                        "stands still, or timeout_ms is shorter than a healthy inner step"
                    )
                self._wait(mark)
            elif word.poll.count == count:
                return word.poll.due

    # --- finish --------------------------------------------------------------------------------------------------

    @property
    def objection(self) -> str | None:
        """Why this group contributes nothing to the running step, or None."""
        return self._objection

    def start_over(self) -> None:
        """The caller computes the step again: what it had computed is dropped.

        What is posted on the lane cannot be taken back, so this quorum ends; the next one reduces the step afresh.
        """
        self._drop_inputs()
        if self._begun_on is not None:
            done = pb.RankDone(
                attempt=self._attempt((self._begun_on, self._round)),
                failure="the training loop started the step over",
                peer_rank=-1,
            )
            self._agent.report(pb.RankFrame(done=done))

    def object(self, reason: str) -> None:
        """Something local went wrong in this step: this group contributes zeros without weight."""
        self._objection = self._objection or reason

    def finish(self, scalars: Mapping[str, float], positions: Mapping[str, int]) -> StepOutcome:
        """Reduce, vote and learn the outcome, over as many quorums as it takes."""
        self._scalars, self._positions = scalars, positions
        while True:
            mark = self._mailbox.mark()
            word = self._mailbox.take()
            if word is not None:
                outcome = self._handle(word)
                if outcome is not None:
                    return outcome
                continue
            if not self.behind:
                self._server.publish(self.head, update_follows=True)
            lane = self._usable_lane()
            if lane is not None and self._posted != (lane.spec.quorum_id, self._round):
                self._post(lane)
            else:
                self._tell_broken_lane()
                self._wait(mark)

    def _post(self, lane: Lane) -> None:
        key = (lane.spec.quorum_id, self._round)
        if self._objection is not None and self._posted is not None:
            for reduction in self.reductions:
                reduction.begin(None, 0.0)
            self._weight = 0.0
        posted = [reduction.post(lane) for reduction in self.reductions]
        operations = tuple(operation for part in posted for operation in part.operations)
        # An objection that came after data had been posted: let this round end as stale, and repeat it with zeros.
        stale = any(part.stale for part in posted) or (self._objection is not None and self._weight > 0)
        report = pb.RankPosted(
            attempt=self._attempt(key),
            stale=stale,
            finite=all(part.finite for part in posted),
            weight=self._weight,
            scalars=dict(self._scalars),
            positions=dict(self._positions),
            objects=self._objection is not None,
        )
        self._posted, self._begun_on = key, lane.spec.quorum_id
        self._agent.report(pb.RankFrame(posted=report))
        _Running(operations, self._attempt(key), self._agent.report)

    def _tell_broken_lane(self) -> None:
        """A lane broke before all was posted on it, while gradients were computed: no operation of an attempt tells it."""
        quorum_id = 0 if self.quorum is None else self.quorum.quorum_id
        key = (quorum_id, self._round)
        failure = self._lanes.broken(quorum_id)
        if failure is None or key in (self._posted, self._told_broken):
            return
        self._told_broken = key
        done = pb.RankDone(
            attempt=self._attempt(key),
            failure=str(failure) or "failed",
            peer_rank=-1 if failure.peer_rank is None else failure.peer_rank,
        )
        self._agent.report(pb.RankFrame(done=done))

    def _attempt(self, key: tuple[int, int]) -> pb.Attempt:
        return pb.Attempt(quorum_id=key[0], step=self.head.step + 1, round=key[1])

    # --- words ---------------------------------------------------------------------------------------------------

    def _handle(self, word: pb.Word) -> StepOutcome | None:
        """Act on a word; an outcome if it ends the step."""
        body = word.WhichOneof("body")
        if body == "configure":
            self.quorum, self._round = word.configure, 0
        elif body == "again":
            self._round = word.again.attempt.round
            if word.again.objects:
                self.object("another rank of this group objects")
            for reduction in self.reductions:
                reduction.again()
        elif body == "commit":
            return self._commit(word.commit)
        elif body == "join":
            return self._join(word.join)
        elif body == "donors":
            self._fetcher.start(to_head(word.donors.head), list(word.donors.addresses))
        elif body == "left":
            raise Left
        elif body == "fatal":
            raise ManagerError(word.fatal.reason)
        return None

    def _commit(self, word: pb.WordCommit) -> StepOutcome:
        self.head = to_head(word.head)
        self._round = 0
        self.leaving = word.leaving
        if word.skip:
            self._drop_inputs()
        else:
            for reduction in self.reductions:
                reduction.write_back(word.total_weight)
        self._server.before_update()
        return StepOutcome(
            head=self.head,
            applied=not word.skip,
            skipped=word.skip,
            behind=self.behind,
            contributed=word.contributed,
            contributors=word.contributors,
            total_weight=word.total_weight,
            retries=word.retries,
            scalars=dict(word.scalars),
            positions=dict(word.positions),
        )

    def _join(self, word: pb.WordJoin) -> StepOutcome:
        self._server.withdraw()
        self._fetcher.reset()
        self.behind, self.head, self._join_epoch = True, to_head(word.head), word.epoch
        self._catch_up.begin(self.head)
        self._drop_inputs()
        return StepOutcome(head=self.head, refused=True, behind=True)

    def _drop_inputs(self) -> None:
        for reduction in self.reductions:
            reduction.discard()

    # --- waiting ---------------------------------------------------------------------------------------------------

    def may_leave(self, timeout_ms: int) -> bool:
        """Before a step, after this group gave up its quorum in order to leave: True if nobody needs it.

        False if it is in the next quorum all the same: it is the last one that holds the state, and stays until another
        one does (F35). After ``timeout_ms`` without an answer it may go.
        """
        self.leaving = False
        for _ in range(max(1, timeout_ms // 100)):
            mark = self._mailbox.mark()
            word = self._mailbox.take()
            if word is None:
                self._mailbox.wait(mark, 100)
            elif word.WhichOneof("body") == "left":
                return True
            else:
                self._handle(word)
                if word.WhichOneof("body") == "configure":
                    return False
        return True

    def wait_left(self, timeout_ms: int) -> bool:
        """Wait until the Lighthouse has confirmed that this group left; False if it did not in time."""
        slices = max(1, timeout_ms // 100)
        for _ in range(slices):
            mark = self._mailbox.mark()
            word = self._mailbox.take()
            if word is None:
                self._mailbox.wait(mark, 100)
            elif word.WhichOneof("body") in ("left", "fatal"):
                return word.WhichOneof("body") == "left"
        return False

    def _usable_lane(self) -> Lane | None:
        """The lane of the quorum that this thread has been told of."""
        lane = self._lanes.current()
        told = lane is not None and self.quorum is not None and lane.spec.quorum_id == self.quorum.quorum_id
        return lane if told else None

    def _report_boundary(self, patient: bool) -> None:
        boundary = pb.RankBoundary(
            fetched=self._fetcher.report is not None and (patient or self._catch_up.nearly_level),
            epoch=self._join_epoch,
            step=self.head.step,
            patient=patient,
            visit=self._visits,
        )
        self._agent.report(pb.RankFrame(boundary=boundary))

    def _wait(self, mark: int, slice_ms: int = WAIT_SLICE_MS) -> None:
        if not self._mailbox.wait(mark, slice_ms) and not self._agent.alive:
            raise ManagerError(f"the agent thread has ended: {self._agent.failure}")
