"""A sum over the members of a lane that is never wider on the wire than a codec makes it.

Each member owns one part. Stage 1, all-to-all: everybody encodes its values and sends each owner its part. The owner decodes
and sums in float32, in the order of ranks, and encodes the sum. Stage 2, all-gather: everybody receives every encoded
sum. All decode the same bytes, so the result is the same everywhere, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchft_plus.process_group.lane import Lane, LaneError, Operation
from torchft_plus.process_group.operation import LaneOperation
from torchft_plus.reduce.codec import Codec

logger = logging.getLogger(__name__)

_ALIGNMENT = 8
_EXACT_BYTES = 4

_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compressed-reduction")
"""Computes between the stages, in the order in which these end; a process ends it when it ends."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How ``elements`` values and ``exact`` numbers are cut among ``members``, at multiples of the codec's block.

    Where blocks begin does not depend on the number of members, and so not what becomes of a value in stage 1.
    """

    elements: int
    exact: int
    members: int
    block: int

    @property
    def part(self) -> int:
        """Values of each part but the last ones, which may be shorter, or empty."""
        return -(-self.elements // (self.block * self.members)) * self.block

    @property
    def exact_part(self) -> int:
        """Exact numbers of each part, padded with zeros."""
        return -(-self.exact // self.members)

    def of(self, rank: int) -> slice:
        """The values that ``rank`` owns."""
        return slice(min(rank * self.part, self.elements), min((rank + 1) * self.part, self.elements))

    def exact_of(self, rank: int) -> slice:
        """The exact numbers that ``rank`` owns."""
        start = min(rank * self.exact_part, self.exact)
        return slice(start, min(start + self.exact_part, self.exact))


class CompressedReduction:
    """Sums float32 values over the members of a lane, in place; itself an ``Operation``.

    Whatever is not to be lost to rounding (counts, flags) follows the values as exact numbers and travels as float32.

    Args:
        lane: of two members or more.
        codec: for the values.
        flat: float32, contiguous: the values, then the exact numbers. Holds the sums when it has ended well, anything
            while it runs and after a failure.
        exact: number of exact numbers.
        last: no further compressed reduction follows soon on this lane: see ``Lane.reserve``.
        keep_error: keep what encoding takes away from the input, and (for the own part) from the sum, in ``error``.
    """

    def __init__(
        self, lane: Lane, codec: Codec, flat: torch.Tensor, exact: int, last: bool, keep_error: bool = False
    ) -> None:
        self._lane = lane
        self._codec = codec
        elements = flat.numel() - exact
        self._values, self._exact = flat[:elements], flat[elements:]
        self._parts = Parts(elements, exact, lane.spec.world_size, codec.block)
        self._payload_bytes = _aligned(codec.payload_bytes(self._parts.part))
        self._row_bytes = self._payload_bytes + _aligned(_EXACT_BYTES * self._parts.exact_part)
        self._operation = LaneOperation(flat)
        self._error: torch.Tensor | None = None
        sent = self._encode_all(keep_error)
        received = torch.empty_like(sent)
        first = lane.all_to_all(received, sent)
        self._place = lane.reserve(last)
        first.add_done_callback(lambda: self._next(first, lambda: self._sum(received)))

    @property
    def wire_bytes(self) -> int:
        """Bytes that this member sends to others."""
        return 2 * self._row_bytes * (self._parts.members - 1)

    @property
    def rounding_error(self) -> torch.Tensor | None:
        """What was not sent of the values, and of the sum of the own part; complete when it has ended well."""
        return self._error

    # --- Operation -----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """True once it has ended. Never blocks."""
        return self._operation.poll()

    @property
    def error(self) -> LaneError | None:
        """Why it failed; None while it runs and after success."""
        return self._operation.error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when it has ended, on any thread, at once if it has ended already."""
        self._operation.add_done_callback(callback)

    # --- the stages ----------------------------------------------------------------------------------------------------

    def _encode_all(self, keep_error: bool) -> torch.Tensor:
        """On the caller's thread, and its stream: the parts of all owners, encoded."""
        sent = torch.zeros(
            self._parts.members * self._row_bytes, dtype=torch.uint8, device=self._values.device
        )
        if keep_error:
            self._error = torch.empty_like(self._values)
        for rank in range(self._parts.members):
            own = self._parts.of(rank)
            row = self._row(sent, rank)
            self._write(row, self._values[own], self._exact[self._parts.exact_of(rank)])
            if self._error is not None:
                self._read(row, self._error[own])
        if self._error is not None:
            torch.sub(self._values, self._error, out=self._error)
        return sent

    def _sum(self, received: torch.Tensor) -> None:
        """Stage 1 has ended: sum the own part, and gather the sums."""
        rank = self._lane.spec.rank
        own, own_exact = self._parts.of(rank), self._parts.exact_of(rank)
        total = torch.zeros_like(self._values[own])
        exact = torch.zeros_like(self._exact[own_exact])
        decoded = torch.empty_like(total)
        for peer in range(self._parts.members):
            row = self._row(received, peer)
            self._read(row, decoded)
            total.add_(decoded)
            exact.add_(self._exact_in(row, exact.numel()))
        sums = torch.zeros(self._row_bytes, dtype=torch.uint8, device=total.device)
        self._write(sums, total, exact)
        if self._error is not None:
            self._read(sums, decoded)
            self._error[own].add_(total.sub_(decoded))
        self._settle()
        gathered = torch.empty_like(received)
        second = self._lane.all_gather(gathered, sums, self._place)
        second.add_done_callback(lambda: self._next(second, lambda: self._spread(gathered)))

    def _spread(self, gathered: torch.Tensor) -> None:
        """Stage 2 has ended: decode all sums."""
        for rank in range(self._parts.members):
            row = self._row(gathered, rank)
            self._read(row, self._values[self._parts.of(rank)])
            exact = self._exact[self._parts.exact_of(rank)]
            exact.copy_(self._exact_in(row, exact.numel()))
        self._settle()
        self._operation.finish()

    def _next(self, ended: Operation, stage: Callable[[], None]) -> None:
        """A collective has ended, on a thread of its library, which must not compute: have the worker do it."""
        if ended.error is not None:
            self._operation.finish(ended.error)
            return
        try:
            _worker.submit(self._compute, stage)
        except RuntimeError as error:  # the process ends
            self._fail(error)

    def _compute(self, stage: Callable[[], None]) -> None:
        try:
            with torch.no_grad(), _own_stream(self._values.device):
                stage()
        except Exception as error:  # out of memory, say: the peers wait for this member
            logger.exception("a compressed reduction failed")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        failure = LaneError(f"a compressed reduction failed: {error}")
        self._lane.abort(str(failure))
        self._operation.finish(failure)

    def _settle(self) -> None:
        """What this thread has launched has been done; all of it was ready to run."""
        if self._values.device.type == "cuda":
            torch.cuda.current_stream(self._values.device).synchronize()

    # --- rows: what one member sends to another ------------------------------------------------------------------------

    def _row(self, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return rows[rank * self._row_bytes : (rank + 1) * self._row_bytes]

    def _write(self, row: torch.Tensor, values: torch.Tensor, exact: torch.Tensor) -> None:
        self._codec.encode(values, row[: self._codec.payload_bytes(values.numel())])
        self._exact_in(row, exact.numel()).copy_(exact)

    def _read(self, row: torch.Tensor, values: torch.Tensor) -> None:
        self._codec.decode(row[: self._codec.payload_bytes(values.numel())], values)

    def _exact_in(self, row: torch.Tensor, count: int) -> torch.Tensor:
        return row[self._payload_bytes : self._payload_bytes + _EXACT_BYTES * count].view(torch.float32)


@contextmanager
def _own_stream(device: torch.device) -> Generator[None]:
    """On a GPU a stream that nobody else uses: what is launched on it waits for nothing that could hang."""
    if device.type != "cuda":
        yield
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(_streams[device]):
        yield


_streams: dict[torch.device, torch.cuda.Stream] = {}
"""The worker's."""


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
