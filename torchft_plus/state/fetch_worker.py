"""One connection of a fetch: takes stripes, asks ahead, measures its speed."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections import deque
from typing import Protocol

from lighthouse.security import describe_tls_error
from torchft_plus.state.donor_connection import DonorConnection, Verdict
from torchft_plus.state.errors import StateError
from torchft_plus.state.http import TooSlow
from torchft_plus.state.load_plan import LoadPlan
from torchft_plus.state.manifest import PIECE_BYTES
from torchft_plus.state.retries import Retries
from torchft_plus.state.stripes import MAX_STRIPE_PIECES, Stripes

_MAX_BAD_PIECES = 32
_MAX_ANNOUNCED = 64
_AHEAD = 2
_FIRST_PIECES = 2
"""Size of a connection's stripes until its speed is known."""
_MOST_SECONDS = 0.5
_LEAST_SECONDS = 0.01
"""How long a stripe takes; below the least, requests cost more than the fetching."""
_GRACE_SECONDS = 0.5
_LATE_SECONDS = 1.0
_LATE_FACTOR = 4.0


class FetchHost(Protocol):
    """The fetch that a connection works for."""

    width: int
    """How many connections share the work."""
    stopped: bool
    stall_s: float

    def connect(self, address: str) -> DonorConnection:
        """A new connection. Raises OSError."""
        ...

    def disconnect(self, connection: DonorConnection) -> None:
        """Close a connection."""
        ...

    def note(self, sentence: str) -> None:
        """Something went wrong on the way."""
        ...

    def rest(self, seconds: float) -> None:
        """Wait, unless the fetch ends."""
        ...

    def contributed(self, address: str, stripes: Stripes) -> None:
        """A stripe from ``address`` is verified."""
        ...


def is_too_slow(owed_bytes: int, bytes_per_s: float, seconds: float, best_bytes_per_s: float) -> bool:
    """True if a connection keeps others waiting that would be much faster.

    Args:
        owed_bytes: what it was asked for and has not sent.
        bytes_per_s: its speed.
        seconds: for how long this speed was measured.
        best_bytes_per_s: speed of the fastest; 0 if it is not known.
    """
    if not owed_bytes or seconds < _GRACE_SECONDS or not best_bytes_per_s:
        return False
    if not bytes_per_s:
        return True
    left_s = owed_bytes / bytes_per_s
    return left_s > _LATE_SECONDS and left_s > _LATE_FACTOR * owed_bytes / best_bytes_per_s


class FetchWorker:
    """Takes stripes for one connection, the next one before the last has come; connects again after failures (``Retries``).

    Args:
        host: the fetch.
        address: of the donor.
        plan: where the bytes go.
        stripes: what is wanted.
        connection: an open one to begin with.
    """

    def __init__(
        self,
        host: FetchHost,
        address: str,
        plan: LoadPlan,
        stripes: Stripes,
        connection: DonorConnection | None = None,
    ) -> None:
        self._host = host
        self._address = address
        self._plan = plan
        self._landing = plan.landing()
        self._stripes = stripes
        self._connection = connection
        self._asked: deque[tuple[int, int]] = deque()
        self._verdicts: list[Verdict] = []
        """Of the pieces that have come of the first range that was asked for."""
        self._announced = 0
        self._retries = Retries(host.stall_s)
        self._bad_pieces = 0
        self._left_out = False
        self._noted = ""
        self._started = time.monotonic()
        self._received_bytes = 0
        self._last_bytes_per_s = 0.0
        self.best_bytes_per_s = 0.0
        """Highest speed of a stripe."""

    def run(self) -> None:
        """Take stripes until there are none, or this donor is given up."""
        try:
            while self._bad_pieces < _MAX_BAD_PIECES and not self._left_out:
                try:
                    self._ask_ahead()
                    if not self._asked:
                        break
                    self._receive()
                except (OSError, StateError) as error:
                    self._fail(error)
            if self._stripes.complete and self._connection is not None:
                with contextlib.suppress(
                    OSError, StateError
                ):  # a courtesy: the donor lets go by itself later
                    self._connection.release([(0, self._stripes.size_bytes)])
        finally:
            self._give_back()
            self._disconnect()
            self._landing.finish()

    # --- speed, for the thread that watches ---

    def pace(self) -> tuple[int, float, float]:
        """What it owes (bytes), its speed since it began to wait for its present stripe (bytes/s), and for how long
        that is (s). Any thread."""
        asked = list(self._asked)
        if not asked:
            return 0, 0.0, 0.0
        received_bytes, seconds = self._received_bytes, time.monotonic() - self._started
        owed_bytes = sum(last - first for first, last in asked) * PIECE_BYTES
        return max(1, owed_bytes - received_bytes), received_bytes / max(seconds, 1e-9), seconds

    def replace(self) -> None:
        """Give back what it owes, and end. Any thread."""
        self._left_out = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    # --- one stripe ---

    def _ask_ahead(self) -> None:
        while len(self._asked) < _AHEAD:
            stripe = self._stripes.take(self._host.width, *self._stripe_pieces(), wait=not self._asked)
            if stripe is None:
                return
            if not self._asked:
                self._begin_to_wait()
            self._asked.append(stripe)
            if self._connection is None:
                self._connection = self._host.connect(self._address)
                self._announced = 0
            news = self._stripes.verified_since(self._announced)[:_MAX_ANNOUNCED]
            self._connection.ask(self._plan, *stripe, news)
            self._announced += len(news)

    def _stripe_pieces(self) -> tuple[int, int]:
        """How many pieces the next stripe should have, at least and at most."""
        pieces_per_s = self._last_bytes_per_s / PIECE_BYTES
        if not pieces_per_s:
            return 1, _FIRST_PIECES
        most_pieces = max(1, min(MAX_STRIPE_PIECES, int(_MOST_SECONDS * pieces_per_s)))
        return min(most_pieces, int(_LEAST_SECONDS * pieces_per_s)), most_pieces

    def _begin_to_wait(self) -> None:
        self._started, self._received_bytes = time.monotonic(), 0

    def _received(self, count: int) -> None:
        self._received_bytes += count

    def _receive(self) -> None:
        assert self._connection is not None
        for verdict in self._connection.receive(self._landing, self._received):
            self._verdicts.append(verdict)
        self._retries.succeeded()
        self._settle_first()
        self._last_bytes_per_s = self._received_bytes / max(time.monotonic() - self._started, 1e-9)
        self.best_bytes_per_s = max(self.best_bytes_per_s, self._last_bytes_per_s)
        self._begin_to_wait()

    def _settle_first(self) -> None:
        """The first range that was asked for is done, as far as it has come."""
        first, last = self._asked.popleft()
        verdicts = dict(enumerate(self._verdicts, first))
        self._verdicts.clear()
        bad = [piece for piece in range(first, last) if verdicts.get(piece) is not Verdict.INTACT]
        self._bad_pieces += sum(verdict is not Verdict.INTACT for verdict in verdicts.values())
        damaged = [piece for piece, verdict in verdicts.items() if verdict is Verdict.DAMAGED]
        if damaged:
            self._host.note(f"donor {self._address}: pieces {damaged} came damaged and are fetched again")
        self._stripes.settle(first, last, bad, self._received_bytes)
        if len(bad) < last - first:
            self._host.contributed(self._address, self._stripes)

    def _fail(self, error: OSError | StateError) -> None:
        self._disconnect()
        if self._left_out:
            speed = self._received_bytes / max(time.monotonic() - self._started, 1e-9)
            self._note(f"at {speed / 1e6:.3g} MB/s it kept the others waiting, who fetch what it owed")
        elif not self._host.stopped:
            self._note(describe(error))
        self._give_back()
        pause_s = self._retries.failed(error, time.monotonic())
        if pause_s is None:
            self._left_out = True
        else:
            self._host.rest(pause_s)

    def _note(self, what: str) -> None:
        if what != self._noted:  # else it is tried again and again
            self._host.note(f"donor {self._address}: {what}")
            self._noted = what

    def _give_back(self) -> None:
        while self._asked:
            self._settle_first()
            self._received_bytes = 0

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._host.disconnect(self._connection)
            self._connection = None
            self._landing.abandon()


def describe(error: Exception) -> str:
    """Why a donor failed, for sentences."""
    if isinstance(error, TimeoutError):
        few = str(error) if isinstance(error, TooSlow) else "no byte came"
        return f"{few} within transfer_stall_ms"
    if isinstance(error, ssl.SSLError):
        return describe_tls_error(error)
    return str(error) or type(error).__name__
