"""Handles in torch's form (``Work`` with ``wait`` and ``get_future``) for what runs on a lane or in a Manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from torchft_plus.process_group.lane import LaneError, Operation

logger = logging.getLogger(__name__)


class OperationWork(Work):
    """Operations of a lane as one torch handle: ``wait`` raises what went wrong, as torch's own handles do.

    Args:
        operations: started operations.
        tensors: what the future holds at the end.
        finish: called once, when all have ended well and before anybody is told.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._operations = tuple(operations)
        self._tensors = list(tensors)
        self._finish = finish
        self._left = len(self._operations)
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._over = threading.Event()
        for operation in self._operations:
            operation.add_done_callback(self._one_ended)
        if not self._operations:
            self._end()

    def _one_ended(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._end()

    def _end(self) -> None:
        error = self.exception()
        if error is None and self._finish is not None:
            self._finish()
        self._over.set()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            failed: Any = self._future  # torch's annotation of set_exception is wrong
            failed.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all have ended.

        Raises:
            LaneError: one failed, or ``timeout`` passed (None and zero: the lane's own deadline ends them).
        """
        seconds = timeout.total_seconds() if timeout else None
        if not self._over.wait(seconds):
            raise LaneError(f"the operation did not end within {seconds} s")
        error = self.exception()
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """True once all have ended, well or not."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """True once all have ended well."""
        return self._over.is_set() and self.exception() is None

    def exception(self) -> LaneError | None:
        """The first failure."""
        return next((one.error for one in self._operations if one.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> Any:
        """Future of the tensors; holds the failure if there was one."""
        return self._future


class TorchWork(Work):
    """A handle of torch's with a future, which not every handle of gloo has.

    Args:
        inner: the handle.
        tensors: what the future holds at the end.
    """

    def __init__(self, inner: Any, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._inner = inner
        self._tensors = list(tensors)
        self._lock = threading.Lock()
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the inner handle's."""
        return bool(self._inner.wait(timeout) if timeout else self._inner.wait())

    def is_completed(self) -> bool:
        """As the inner handle's."""
        return bool(self._inner.is_completed())

    def result(self) -> list[Any]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> Any:
        """Future of the tensors. Where torch has none, a thread waits for the handle."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        threading.Thread(target=self._complete, name="work-future", daemon=True).start()
        return self._future

    def _complete(self) -> None:
        try:
            self._inner.wait()
        except Exception as error:  # noqa: BLE001 - handed on
            self._future.set_exception(error)
        else:
            self._future.set_result(self._tensors)


class FinishedWork(Work):
    """A handle of what is over.

    Args:
        tensors: what the future holds.
        error: it failed.
    """

    def __init__(self, tensors: Sequence[Any], error: Exception | None = None) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._failure = error
        self._future: Any = torch.futures.Future()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True at once, or raises the failure."""
        del timeout
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def get_future(self) -> Any:
        """A future that has ended."""
        return self._future


class InnerWork(Protocol):
    """What a Manager's allreduce returns."""

    def wait(self, timeout: Any = None) -> Any: ...

    def get_future(self) -> Any: ...


class SwallowingWork(Work):
    """A handle that always ends well; failures are told to ``report`` and left to the vote.

    Args:
        inner: the running reductions; none for one that could not be started.
        tensors: what the future holds at the end, reduced or not.
        report: told of each failure.
    """

    def __init__(
        self,
        inner: Sequence[InnerWork],
        tensors: Sequence[torch.Tensor],
        report: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._inner = tuple(inner)
        self._tensors = list(tensors)
        self._report = report
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._left = 0
        self._reported = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all reductions, as long as the Manager waits; never raises."""
        for work in self._inner:
            try:
                work.wait(timeout) if timeout else work.wait()
            except Exception as error:  # noqa: BLE001 - whatever it is, the step is refused at the vote
                self._say(error)
        return True

    def get_future(self) -> Any:
        """A future that ends when the reductions do, always with the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            self._left = len(self._inner)
        if not self._inner:
            self._future.set_result(self._tensors)
        for work in self._inner:
            try:
                work.get_future().add_done_callback(self._one_ended)
            except Exception as error:  # noqa: BLE001 - as in wait
                self._say(error)
                self._count_down()
        return self._future

    def is_completed(self) -> bool:
        """True once the future has ended."""
        return bool(self.get_future().done())

    def is_success(self) -> bool:
        """Always True once it has ended: the vote knows better."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def _one_ended(self, future: Any) -> None:
        try:
            future.value()
        except Exception as error:  # noqa: BLE001 - as in wait
            self._say(error)
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._future is not None:
            self._future.set_result(self._tensors)

    def _say(self, error: Exception) -> None:
        with self._lock:
            first, self._reported = not self._reported, True
        if first:
            logger.warning("a reduction failed, the step is left to the vote: %s", error)
            self._report(error)
