"""Fetches the state of a head in the background, for one rank that is behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lighthouse.events import EventLog
from lighthouse.messages import Head
from torchft_plus.state.fetch import FetchReport, StateError, fetch_state
from torchft_plus.state.registry import StateRegistry

logger = logging.getLogger(__name__)


class Fetcher:
    """At most one running fetch; a newer one cancels it.

    Args:
        report_failure: called with a sentence when the state cannot be had from any donor (fetch thread).
        wake: called when the state has arrived (fetch thread).
    """

    def __init__(
        self,
        registry: StateRegistry,
        stall_ms: int,
        events: EventLog,
        report_failure: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
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
        self._result: FetchReport | None = None

    def start(self, head: Head, donors: list[str]) -> None:
        """Fetch ``head``; a running fetch of the same head goes on, and turns to the new donors if its own fail."""
        with self._lock:
            self._donors = donors
            if self._head == head and (self._thread is not None or self._result is not None):
                return
            before = self._thread
            self._stop_locked()
            self._head, self._result = head, None
            cancel = self._cancel = threading.Event()
            thread = threading.Thread(
                target=self._run, args=(head, cancel, before), name="fetch", daemon=True
            )
            self._thread = thread
            thread.start()

    def take(self) -> FetchReport | None:
        """The finished fetch, if there is one; None while it runs."""
        with self._lock:
            return self._result

    def reset(self) -> None:
        """Give up what is running or finished: another head is wanted, or the group is level."""
        with self._lock:
            self._stop_locked()
            self._head = self._result = None

    def close(self, timeout_ms: int) -> None:
        """Cancel and wait for the thread."""
        with self._lock:
            thread = self._thread
            self._stop_locked()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_ms / 1000)

    def _stop_locked(self) -> None:
        self._cancel.set()
        self._thread = None

    def _run(self, head: Head, cancel: threading.Event, before: threading.Thread | None) -> None:
        if before is not None:
            before.join(
                2 * self._stall_ms / 1000
            )  # it was cancelled, and writes into the same tensors until it ends
        tried: list[str] | None = None
        while not cancel.is_set():
            with self._lock:
                donors = list(self._donors)
            if donors == tried:
                return
            tried = donors
            self._events.emit("fetch_started", step=head.step, donors=donors)
            try:
                report = fetch_state(
                    self._registry, head, donors, transfer_stall_ms=self._stall_ms, cancel=cancel
                )
            except StateError as error:
                logger.warning("state of step %d was not fetched: %s", head.step, error)
                self._failed(head, cancel, donors, str(error))
                continue
            self._finished(head, cancel, report)
            return

    def _failed(self, head: Head, cancel: threading.Event, donors: list[str], reason: str) -> None:
        with self._lock:
            again = donors != self._donors
            current = self._head == head and not cancel.is_set()
            if current and not again:
                self._thread = None
                self._head = None
        if current and not again:
            self._report_failure(reason)

    def _finished(self, head: Head, cancel: threading.Event, report: FetchReport) -> None:
        with self._lock:
            if cancel.is_set() or self._head != head:
                return
            self._result, self._thread = report, None
        self._events.emit("fetched", step=head.step, size_bytes=report.size_bytes, seconds=report.seconds)
        self._wake()
