"""Fetches the state of a head in the background, for one rank that is behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lighthouse.events import EventLog
from lighthouse.messages import Head
from lighthouse.security import Security
from torchft_plus.state.errors import StateError
from torchft_plus.state.fetch import FetchReport, fetch_state
from torchft_plus.state.registry import StateRegistry

logger = logging.getLogger(__name__)


class Fetcher:
    """At most one running fetch; a newer one cancels it.

    Args:
        registry: receives the state.

        stall_ms: a donor that sends no byte for this long has stalled.
        events: event log.
        report_failure: called with a sentence when the state cannot be had from any donor (fetch thread).
        wake: called when a fetch has ended, well or not (fetch thread).
        security: what donors are shown.
    """

    def __init__(
        self,
        registry: StateRegistry,
        stall_ms: int,
        events: EventLog,
        report_failure: Callable[[str], None],
        wake: Callable[[], None],
        security: Security | None = None,
    ) -> None:
        self._security = security
        self._registry = registry

        self._stall_ms = stall_ms
        self._events = events
        self._report_failure = report_failure
        self._wake = wake
        self._lock = threading.Lock()
        self._head: Head | None = None
        self._donors: list[str] = []
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self.report: FetchReport | None = None
        """The finished fetch of the wanted head."""
        self.failed = False
        """The last fetch has failed, and this was reported."""

    def start(self, head: Head, donors: list[str]) -> None:
        """Fetch ``head``; a fetch of the same head goes on, and begins again with the new donors if its own fail."""
        with self._lock:
            self._donors = donors
            if self._head == head:
                return
            before = self._thread
            self._cancel.set()
            self._head, self.report, self.failed = head, None, False
            cancel = self._cancel = threading.Event()
            thread = threading.Thread(
                target=self._run, args=(head, cancel, before), name="fetch", daemon=True
            )
            self._thread = thread
            thread.start()

    def reset(self) -> None:
        """Give up what is running: another head is wanted, or the group is level."""
        with self._lock:
            self._cancel.set()
            self._head = self.report = None

    def close(self, timeout_ms: int) -> None:
        """Cancel and wait for the thread."""
        self.reset()
        if self._thread is not None:
            self._thread.join(timeout_ms / 1000)

    def _run(self, head: Head, cancel: threading.Event, before: threading.Thread | None) -> None:
        tried: list[str] | None = None
        reason = ""
        if before is not None:
            # It was cancelled, and writes into the same tensors until it has ended.
            before.join(2 * self._stall_ms / 1000)
            if before.is_alive():
                tried, reason = self._donors, "the fetch before this one does not end"
        while True:
            with self._lock:
                if cancel.is_set():
                    return
                donors = list(self._donors)
                if donors == tried:
                    self._head, self.failed = None, True
            if donors == tried:
                self._report_failure(reason)
                self._wake()
                return
            tried = donors
            try:
                self._fetch(head, donors, cancel)
                return
            except StateError as error:
                reason = str(error)
                logger.warning("state of step %d was not fetched: %s", head.step, reason)

    def _fetch(self, head: Head, donors: list[str], cancel: threading.Event) -> None:
        self._events.emit("fetch_started", step=head.step, donors=donors)
        report = fetch_state(
            self._registry,
            head,
            donors,
            transfer_stall_ms=self._stall_ms,
            cancel=cancel,
            security=self._security,
        )
        with self._lock:
            if cancel.is_set():
                return
            self.report = report
        self._events.emit(
            "fetched",
            step=head.step,
            size_bytes=report.size_bytes,
            seconds=report.seconds,
            refetched_bytes=report.refetched_bytes,
            notes=list(report.notes),
        )
        self._wake()
