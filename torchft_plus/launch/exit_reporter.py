"""Tells the Lighthouse, from a thread of its own, which processes have ended."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from lighthouse.client import LighthouseRefused, LighthouseUnreachable, report_exit
from lighthouse.messages import Process
from lighthouse.security import Security

logger = logging.getLogger(__name__)

_ATTEMPT_S = 1.0


class ExitReporter:
    """Delivers reports of exits in order, and again until the Lighthouse has taken them.

    A report outlives a Lighthouse that is down: the one that comes back must know which members of its last
    quorum are certainly gone (rules L5 and R2).

    Args:
        address: gives the present address of the Lighthouse.
        job_id: the job.
        security: what the Lighthouse is shown.
    """

    def __init__(self, address: Callable[[], str], job_id: str, security: Security | None = None) -> None:
        self._security = security
        self._address = address
        self._job_id = job_id
        self._queue: queue.SimpleQueue[Process | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name="exit-reporter", daemon=True)
        self._thread.start()

    def report(self, process: Process) -> None:
        """Report that ``process`` will never act again. Returns at once."""
        self._queue.put(process)

    def close(self) -> None:
        """Give up what was not delivered and end the thread."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout=2 * _ATTEMPT_S)

    def _deliver_all(self) -> None:
        while (process := self._queue.get()) is not None:
            while not self._closing.is_set() and not self._deliver(process):
                self._closing.wait(0.1)

    def _deliver(self, process: Process) -> bool:
        try:
            report_exit(self._address(), self._job_id, process, timeout_s=_ATTEMPT_S, security=self._security)
        except LighthouseUnreachable:
            return False
        except (ValueError, LighthouseRefused) as error:
            logger.error("The Lighthouse refused the report of the exit of %s: %s", process, error)
        return True
