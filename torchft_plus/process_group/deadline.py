"""Calls into a library that may never return, each on a thread of its own and under a deadline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DeadlineExceeded(RuntimeError):
    """The call did not return in time. Its thread is left behind."""


class _Call(Generic[Result]):
    """One call on a daemon thread, which ends with the call (or the process)."""

    def __init__(self, function: Callable[[], Result], discard: Callable[[Result], None] | None) -> None:
        self._function = function
        self._discard = discard
        self._lock = threading.Lock()
        self._abandoned = False
        self.ended = threading.Event()
        self.result: list[Result] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - carried over to the waiting thread, or logged if nobody waits
            self.error = error
        else:
            with self._lock:
                late = self._abandoned
                if not late:
                    self.result.append(result)
            if late and self._discard is not None:
                self._discard(result)
        finally:
            self.ended.set()

    def abandon(self) -> bool:
        """Give it up; False if it has just ended after all."""
        with self._lock:
            self._abandoned = not self.result and self.error is None
            return self._abandoned


def call_within(
    timeout_ms: int,
    function: Callable[[], Result],
    name: str,
    discard: Callable[[Result], None] | None = None,
) -> Result:
    """Run ``function`` on its own thread and wait for it at most ``timeout_ms``.

    Args:
        timeout_ms: how long to wait.
        function: what may hang.
        name: of the thread, for people.
        discard: receives a result that came too late.

    Raises:
        DeadlineExceeded: it did not return in time; the thread is left behind and ends when the call does.
    """
    call = _Call(function, discard)
    threading.Thread(target=call.run, name=name, daemon=True).start()
    if not call.ended.wait(timeout_ms / 1000) and call.abandon():
        raise DeadlineExceeded(f"{name} did not return within {timeout_ms} ms")
    if call.error is not None:
        raise call.error
    return call.result[0]


def run_in_background(timeout_ms: int, function: Callable[[], None], name: str) -> None:
    """Run ``function`` on a daemon thread; say so in the log if it takes longer than ``timeout_ms`` or fails.

    At the very end of the interpreter, when no thread can be started any more, it runs in place.
    """

    def watched() -> None:
        overdue = threading.Timer(timeout_ms / 1000, _say_overdue, (name, timeout_ms))
        overdue.daemon = True
        overdue.start()
        try:
            function()
        except Exception:  # nobody waits for it: the log is the only reader
            logger.exception("%s failed", name)
        finally:
            overdue.cancel()

    try:
        threading.Thread(target=watched, name=name, daemon=True).start()
    except RuntimeError:  # "can't start new thread at interpreter shutdown"
        function()


def _say_overdue(name: str, timeout_ms: int) -> None:
    logger.warning("%s has not returned after %d ms; it is left behind", name, timeout_ms)
