"""Fetching a version from its donors, straight into the joiner's tensors."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lighthouse.messages import Head
from lighthouse.security import Security
from torchft_plus.state.donor_connection import DonorConnection, DonorRefusal
from torchft_plus.state.errors import StateError
from torchft_plus.state.fetch_worker import FetchWorker, describe, is_too_slow
from torchft_plus.state.load_plan import LoadPlan
from torchft_plus.state.manifest import Manifest, head_name, parse_manifest
from torchft_plus.state.registry import StateRegistry
from torchft_plus.state.retries import Retries
from torchft_plus.state.stripes import Stripes

_POLL_SECONDS = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchReport:
    """A version that was received completely and verified."""

    head: Head
    size_bytes: int
    seconds: float
    donors: tuple[str, ...]
    """Addresses that gave something."""
    refetched_bytes: int
    """Bytes that were received more than once: damaged, torn, or lost with a donor before they were
    verified."""
    notes: tuple[str, ...]
    """What went wrong on the way, one sentence each."""
    plan: LoadPlan
    """For ``StateRegistry.apply_tensors`` or ``CatchUp.take_state``; ``plan.manifest.values`` for
    ``apply_values``."""


def fetch_state(
    registry: StateRegistry,
    head: Head,
    donors: Sequence[str],
    *,
    transfer_stall_ms: int = 15_000,
    wait_ms: int | None = None,
    cancel: threading.Event | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    connections_per_donor: int | None = None,
    security: Security | None = None,
) -> FetchReport:
    """Receive version ``head`` into the memory of the registered tensors. Blocks; for a background thread.

    The bytes are written into live tensors, which is why nothing may be computed with them: from the first
    byte on ``registry.holds_state`` is False, and it stays so after an error, until the result of a fetch is
    applied on the training thread (``apply_values`` at the version's head, then ``apply_tensors``). Optimizer
    state that does not exist here is allocated as the manifest says.

    All donors are asked at once and share the work, by their speed. What a donor owes when it fails others fetch. One that
    stalls or speaks nonsense is tried once more and then left out; one that refuses is left out at once; a connection that
    breaks is made again for as long as ``transfer_stall_ms``, since it may have broken here. One that damages many pieces, or
    is so slow that the others would wait for it, is left out, too.

    Args:
        registry: where the state goes.
        head: the version, compared as a whole.
        donors: "host:port" of their state servers, of the same shard as ours.
        transfer_stall_ms: a donor that sends no byte for this long, or less than 1 MiB, has stalled.
        wait_ms: how long donors may take to reach the boundary at which they can serve ``head``; default:
            four stalls.
        cancel: set it to end the fetch with an error.
        on_progress: called with verified and total bytes, on threads of the fetch.
        connections_per_donor: default: 2 for a single donor, else 1; also 1 on a machine of one or two cores, where a
            second one costs a tenth more CPU and gains nothing.
        security: what donors are shown.

    Raises:
        StateError: no donor could give all of it, something does not fit what is registered here, or it was
            cancelled.
    """
    if not donors:
        raise StateError(f"version {head_name(head)} cannot be fetched: there is no donor")
    fetch = _Fetch(
        registry,
        head,
        stall_ms=transfer_stall_ms,
        wait_ms=4 * transfer_stall_ms if wait_ms is None else wait_ms,
        connections=connections_per_donor or (2 if len(donors) == 1 and (os.cpu_count() or 1) > 2 else 1),
        on_progress=on_progress or (lambda _done, _total: None),
        security=security,
    )
    return fetch.run(list(dict.fromkeys(donors)), cancel or threading.Event())


class _Fetch:
    """One call of ``fetch_state``: a thread for each connection."""

    def __init__(
        self,
        registry: StateRegistry,
        head: Head,
        *,
        stall_ms: int,
        wait_ms: int,
        connections: int,
        on_progress: Callable[[int, int], None],
        security: Security | None,
    ) -> None:
        self._security = security
        self._registry = registry
        self._head = head
        self._stall_ms = stall_ms
        self.stall_s = stall_ms / 1000
        self._wait_ms = wait_ms
        self._connections = connections
        self.width = connections
        """How many connections share the work."""
        self._on_progress = on_progress
        self._reader = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._plan: LoadPlan | None = None
        self._plan_donor = ""
        self._stripes: Stripes | None = None
        self._open: set[DonorConnection] = set()
        self._threads: list[threading.Thread] = []
        self.stopped = False
        self._ended = threading.Event()
        """Nothing more is to be fetched."""
        self._moved = threading.Event()
        self._workers: list[FetchWorker] = []
        self._contributed: dict[str, None] = {}
        self._notes: list[str] = []
        self._error: BaseException | None = None

    def run(self, donors: list[str], cancel: threading.Event) -> FetchReport:
        """Fetch it; see ``fetch_state``."""
        started = time.monotonic()
        self.width *= len(donors)
        for address in donors:
            self._start(self._lead, address)
        try:
            while not (self._is_over() or cancel.is_set()):
                self._moved.wait(_POLL_SECONDS)
                self._moved.clear()
                self._replace_slow()
        finally:
            self._stop()
        if self._error is not None:
            raise self._error
        plan, stripes = self._plan, self._stripes
        if plan is None or stripes is None or not stripes.complete:
            raise StateError(self._why_not(cancel.is_set()))
        plan.finish()
        return FetchReport(
            head=self._head,
            size_bytes=stripes.size_bytes,
            seconds=time.monotonic() - started,
            donors=tuple(self._contributed),
            refetched_bytes=stripes.refetched_bytes,
            notes=tuple(self._notes),
            plan=plan,
        )

    # --- threads ---

    def _start(self, target: Callable[[str], None], address: str) -> None:
        thread = threading.Thread(
            target=self._guard, args=(target, address), name=f"state-fetch-{address}", daemon=True
        )
        with self._lock:
            self._threads.append(thread)
            thread.start()

    def _is_over(self) -> bool:
        with self._lock:
            complete = self._stripes is not None and self._stripes.complete and not self._workers
            return complete or self.stopped or not any(thread.is_alive() for thread in self._threads)

    def _running(self) -> threading.Thread | None:
        with self._lock:
            return next((thread for thread in self._threads if thread.is_alive()), None)

    def _stop(self) -> None:
        self._ended.set()
        with self._lock:
            self.stopped = True
            if self._stripes is not None:
                self._stripes.stop()
            for connection in self._open:
                connection.abort()
        while (thread := self._running()) is not None:
            thread.join()

    def _guard(self, target: Callable[[str], None], address: str) -> None:
        try:
            target(address)
        except BaseException as error:  # noqa: BLE001 - raised again by run(), on the caller's thread
            self._error = error
            with self._lock:
                self.stopped = True
        finally:
            self._moved.set()

    def _why_not(self, cancelled: bool) -> str:
        what = f"version {head_name(self._head)} could not be fetched"
        if cancelled:
            return f"{what}: it was cancelled"
        if self._stripes is not None:
            what += f" ({self._stripes.verified_bytes} of {self._stripes.size_bytes} bytes were)"
        return f"{what}: " + "; ".join(self._notes)

    def note(self, sentence: str) -> None:
        """Something went wrong on the way."""
        _log.warning("fetch of version %s: %s", head_name(self._head), sentence)
        self._notes.append(sentence)

    def rest(self, seconds: float) -> None:
        """Wait, unless the fetch ends."""
        self._ended.wait(seconds)

    # --- one donor ---

    def connect(self, address: str) -> DonorConnection:
        """A new connection to a donor, which ends with the fetch. Raises OSError."""
        connection = DonorConnection(address, self._head, self._reader, self._stall_ms, self._security)
        with self._lock:
            self._open.add(connection)
        try:
            if self.stopped:
                raise ConnectionAbortedError("the fetch has ended")
            connection.open()
        except OSError:
            self.disconnect(connection)
            raise
        return connection

    def disconnect(self, connection: DonorConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _lead(self, address: str) -> None:
        """First connection to a donor: its manifest, then its share of the stripes."""
        connection: DonorConnection | None = None
        try:
            connection, manifest = self._ask_manifest(address)
            self._accept(address, manifest)
        except BaseException as error:
            if connection is not None:
                self.disconnect(connection)
            if not isinstance(error, OSError | ValueError | StateError):
                raise
            if not self.stopped:
                self.note(f"donor {address}: {describe(error)}")
            return
        for _ in range(self._connections - 1):
            self._start(self._work, address)
        self._work(address, connection)

    def _ask_manifest(self, address: str) -> tuple[DonorConnection, Manifest]:
        """The donor's manifest, and the connection that it came by."""
        deadline = time.monotonic() + self._wait_ms / 1000
        retries = Retries(self.stall_s)
        while True:
            left_ms = int(1000 * (deadline - time.monotonic()))
            try:
                return self._manifest_by_a_new_connection(address, left_ms)
            except DonorRefusal as error:
                if error.status != 503 or left_ms <= 0:
                    raise
            except OSError as error:
                pause_s = retries.failed(error, time.monotonic())
                if pause_s is None or self.stopped:
                    raise
                self.rest(pause_s)

    def _manifest_by_a_new_connection(self, address: str, left_ms: int) -> tuple[DonorConnection, Manifest]:
        connection = self.connect(address)
        try:
            text = connection.manifest(max(0, min(left_ms, self._stall_ms // 2)))
            return connection, parse_manifest(text, self._head)
        except BaseException:
            self.disconnect(connection)
            raise

    def _accept(self, address: str, manifest: Manifest) -> None:
        """The first manifest that fits is the plan; the others must be the same."""
        with self._lock:
            if self._plan is None:
                plan = self._registry.plan_load(manifest)
                self._registry.begin_load(manifest)
                self._plan, self._plan_donor, self._stripes = plan, address, Stripes(manifest.size_bytes)
                return
            first = self._plan.manifest
        if replace(manifest, header_bytes=first.header_bytes) != first:
            raise StateError(f"its manifest differs from that of {self._plan_donor} for the same version")

    def _work(self, address: str, connection: DonorConnection | None = None) -> None:
        """Fetch stripes from one donor until nothing is wanted, or the donor has failed too often."""
        plan, stripes = self._plan, self._stripes
        assert plan is not None
        assert stripes is not None
        worker = FetchWorker(self, address, plan, stripes, connection)
        with self._lock:
            self._workers.append(worker)
        try:
            worker.run()
        finally:
            with self._lock:
                self._workers.remove(worker)
            self._moved.set()

    def _replace_slow(self) -> None:
        """When others have nothing to do, whoever keeps them waiting gives its stripes back."""
        with self._lock:
            stripes, workers = self._stripes, list(self._workers)
        if stripes is None or not stripes.idle:
            return
        best = max((worker.best_bytes_per_s for worker in workers), default=0.0)
        for worker in workers:
            owed_bytes, bytes_per_s, seconds = worker.pace()
            if is_too_slow(owed_bytes, bytes_per_s, seconds, best):
                worker.replace()

    def contributed(self, address: str, stripes: Stripes) -> None:
        """A stripe from ``address`` is verified."""
        self._contributed[address] = None
        if stripes.complete:
            self._ended.set()
        self._on_progress(stripes.verified_bytes, stripes.size_bytes)
