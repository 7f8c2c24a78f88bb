"""Builds the lane of each new quorum, away from the training thread, and knows which lane may be used."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore

from torchft_plus.manager.transport import split_address
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.process_group.lane import Backend, Lane, LaneError, LaneSpec

logger = logging.getLogger(__name__)


class LaneBuilder:
    """Owns the lanes of one rank.

    A build runs on a thread of its own: a newer quorum never waits for an older one's dead peers, and the training
    thread, which may sit in an FSDP collective with ranks that wait for the lane, is not involved.

    Args:
        report: called with the outcome of each build (any thread).
        wake: called when a lane is ready (any thread).
    """

    def __init__(
        self,
        backend: Backend,
        job_id: str,
        group_rank: int,
        configure_ms: int,
        operation_ms: int,
        report: Callable[[pb.RankConfigured], None],
        wake: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._job_id = job_id
        self._group_rank = group_rank
        self._configure_ms = configure_ms
        self._operation_ms = operation_ms
        self._report = report
        self._wake = wake
        self._lock = threading.Lock()
        self._lane: Lane | None = None
        self._wanted = 0
        self._fenced = 0
        self._failed = 0
        """The last quorum whose lane could not be built."""
        self._threads: list[threading.Thread] = []

    def configure(self, word: pb.WordConfigure) -> None:
        """Build the lane of a quorum in the background; the lane before it is retired."""
        with self._lock:
            self._wanted = word.quorum_id
            old, self._lane = self._lane, None
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=self._build, args=(word,), name=f"lane-{word.quorum_id}", daemon=True
            )
            self._threads.append(thread)
        if old is not None:
            old.retire()
        thread.start()

    def abort(self, quorum_id: int, reason: str) -> None:
        """Operations of this and older quorums end as failures, now and in future (any thread)."""
        with self._lock:
            self._fenced = max(self._fenced, quorum_id)
            lane = self._lane
        if lane is not None and lane.spec.quorum_id <= quorum_id:
            lane.abort(reason)
        self._wake()

    def current(self) -> Lane | None:
        """The lane of the newest quorum, if it is built and not given up."""
        with self._lock:
            lane = self._lane
            usable = lane is not None and lane.spec.quorum_id > self._fenced and lane.error is None
            return lane if usable else None

    def broken(self, quorum_id: int) -> LaneError | None:
        """Why the lane of this quorum does not work any more, though nobody here has given it up."""
        with self._lock:
            lane = self._lane
            kept = lane is not None and lane.spec.quorum_id == quorum_id > self._fenced
            return lane.error if lane is not None and kept else None

    def is_building(self, quorum_id: int) -> bool:
        """The lane of this quorum is not there yet, and may still come."""
        with self._lock:
            wanted = quorum_id == self._wanted and quorum_id > self._fenced
            return wanted and self._lane is None and quorum_id != self._failed

    def close(self) -> None:
        """Retire the lane, and wait for builders up to their deadline."""
        with self._lock:
            self._fenced = self._wanted
            lane, self._lane = self._lane, None
            threads = self._threads
        if lane is not None:
            lane.retire()
        for thread in threads:
            thread.join(self._configure_ms / 1000)

    def _build(self, word: pb.WordConfigure) -> None:
        failure, peer_rank = "", -1
        try:
            lane = self._backend.create(self._spec(word))
            with self._lock:
                usable = word.quorum_id == self._wanted and word.quorum_id > self._fenced
                if usable:
                    self._lane = lane
            if not usable:
                lane.retire()
                return
        except LaneError as error:
            failure, peer_rank = str(error), -1 if error.peer_rank is None else error.peer_rank
        except (DistError, RuntimeError, OSError, ValueError) as error:
            # The store's host may have died between the quorum and now: an ordinary fault of this quorum.
            failure = f"store at {word.store_address}: {error}"
        if failure:
            logger.warning("lane of quorum %d was not built: %s", word.quorum_id, failure)
            with self._lock:
                self._failed = word.quorum_id
        self._report(pb.RankConfigured(quorum_id=word.quorum_id, failure=failure, peer_rank=peer_rank))
        self._wake()

    def _spec(self, word: pb.WordConfigure) -> LaneSpec:
        host, port = split_address(word.store_address)
        store = TCPStore(host, port, is_master=False, timeout=timedelta(milliseconds=self._configure_ms))
        prefix = f"torchft_plus/{self._job_id}/{word.quorum_id}/{self._group_rank}"
        return LaneSpec(
            store=PrefixStore(prefix, store),
            rank=word.replica_rank,
            world_size=word.replica_world_size,
            quorum_id=word.quorum_id,
            build_timeout_ms=self._configure_ms,
            timeout_ms=self._operation_ms,
            name=f"quorum {word.quorum_id}",
        )
