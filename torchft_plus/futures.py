"""Deadlines for futures and for blocks of code, under torchft's names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch


def future_timeout(fut: Any, timeout: timedelta) -> Any:
    """A future with the outcome of ``fut``, or with a ``TimeoutError`` if that has none after ``timeout``.

    Args:
        fut: a ``torch.futures.Future``.
        timeout: from now on.
    """
    result: Any = torch.futures.Future()
    lock = threading.Lock()
    over = False

    def end(finish: Callable[[], None]) -> None:
        nonlocal over
        with lock:
            first, over = not over, True
        if first:
            finish()

    def too_late() -> None:
        late = TimeoutError(f"the future did not complete within {timeout}")
        end(lambda: result.set_exception(late))

    timer = threading.Timer(timeout.total_seconds(), too_late)
    timer.daemon = True

    def ended(done: Any) -> None:
        timer.cancel()
        try:
            value = done.value()
        except Exception as error:  # noqa: BLE001 - handed on
            failure = error
            end(lambda: result.set_exception(failure))
        else:
            end(lambda: result.set_result(value))

    timer.start()
    fut.add_done_callback(ended)
    return result


def future_wait(fut: Any, timeout: timedelta) -> Any:
    """The result of ``fut``.

    Raises:
        TimeoutError: there is none after ``timeout``.
    """
    ended = threading.Event()
    fut.add_done_callback(lambda _: ended.set())
    if not ended.wait(timeout.total_seconds()):
        raise TimeoutError(f"the future did not complete within {timeout}")
    return fut.wait()


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Generator[None]:
    """Call ``callback`` on another thread if the block takes longer than ``timeout``."""
    timer = threading.Timer(timeout.total_seconds(), callback)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Call ``callback`` on another thread if what is queued on the current accelerator stream takes longer than ``timeout``.

    Without an accelerator nothing is queued and nothing happens.
    """
    if not torch.accelerator.is_available():
        return
    event = torch.Event(device=torch.accelerator.current_accelerator())
    event.record()

    def look() -> None:
        if not event.query():
            callback()

    timer = threading.Timer(timeout.total_seconds(), look)
    timer.daemon = True
    timer.start()
