"""Whether and when a donor that failed is tried again. Pure."""

from __future__ import annotations

import errno

from torchft_plus.state.donor_connection import DonorRefusal
from torchft_plus.state.errors import StateError
from torchft_plus.state.http import BrokenOff

MAX_FAILURES = 2
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
_NOT_YET = 503
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class Retries:
    """One donor's failures since it gave something.

    A connection that broke may have broken here, with those to all donors: it is made again and again for a while, at once and
    then at growing intervals. What is a donor's own doing, a silence, a refused connection or nonsense, is forgiven once; a
    refusal never, but for "not yet".

    Args:
        patience_s: for how long connections that break are made again.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._broken = self._own = 0

    def succeeded(self) -> None:
        """It gave something."""
        self._since, self._broken, self._own = None, 0, 0

    def failed(self, error: Exception, now: float) -> float | None:
        """It failed.

        Args:
            error: how.
            now: monotonic seconds.

        Returns:
            Seconds until it is to be tried again; None if it is to be left out.
        """
        if isinstance(error, StateError) and not _is_not_yet(error):
            return None
        if not _broke(error):
            self._own += 1
            return 0.0 if self._own < MAX_FAILURES else None
        self._since = now if self._since is None else self._since
        if now >= self._since + self._patience_s:
            return None
        self._broken += 1
        return 0.0 if self._broken == 1 else min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._broken - 2))


def _is_not_yet(error: StateError) -> bool:
    return isinstance(error, DonorRefusal) and error.status == _NOT_YET


def _broke(error: Exception) -> bool:
    """True if the connection was there and went, or the network did."""
    if isinstance(error, BrokenOff | ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
        return True
    return isinstance(error, OSError) and error.errno in _UNREACHABLE
