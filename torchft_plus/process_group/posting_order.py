"""In which order a lane's collectives are posted, when some of them can only be posted later.

A lane matches collectives by their order, so this must be the same on every member; but the second collective of a reduction in
two stages is ready when the first one has ended and its result is computed, which happens at other moments on each
member. So its place is fixed beforehand, by the order of calls alone, and what comes after it waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torchft_plus.process_group.operation import LaneOperation

Start = Callable[[], LaneOperation]
"""Posts a collective. Never blocks, never raises."""

AHEAD = 2
"""So many first stages may be posted before the second stage of an older reduction: they hide its computation."""


@dataclass(slots=True)
class _Entry:
    """A collective in its place: posted when all before it are and ``start`` is there."""

    operation: LaneOperation
    start: Start | None = None


class Place:
    """The reserved place of a second stage."""

    def __init__(self, order: PostingOrder) -> None:
        self._order = order
        self._entry = _Entry(LaneOperation())

    def take(self, start: Start) -> LaneOperation:
        """The second stage is ready: post it as soon as everything before its place is posted. Any thread; once."""
        return self._order._fill(self._entry, start)  # pyright: ignore[reportPrivateUsage]


class PostingOrder:
    """One lane's collectives in their order. Any thread may call anything; nothing blocks.

    The order is: first stages and plain collectives as they were called; each second stage after the first stages of
    the ``ahead`` reductions that follow, or, when one is reserved as the last, at once after that one's first stage.
    """

    def __init__(self, ahead: int = AHEAD) -> None:
        self._ahead = ahead
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque()
        self._without_place: deque[_Entry] = deque()
        """Second stages whose place depends on what is called next."""
        self._posting = False
        """A thread is in the library; it goes on with what others have added meanwhile. So while none is, the first entry is
        not ready."""
        self._broken = False

    def post(self, start: Start) -> LaneOperation:
        """Post a collective in the next place: at once if everything before it is posted, else as soon as it is."""
        with self._lock:
            at_once = self._broken or not (self._entries or self._posting)
            self._posting = self._posting or (at_once and not self._broken)
            broken = self._broken
            entry = _Entry(LaneOperation(), start)
            if not at_once:
                self._entries.append(entry)
        if broken:
            return start()
        if at_once:
            operation = start()
            self._go_on()
            return operation
        return entry.operation

    def reserve(self, last: bool) -> Place:
        """A place for the second stage of the reduction whose first stage was posted just now.

        Args:
            last: no further reduction in stages follows soon: do not wait for it.
        """
        place = Place(self)
        with self._lock:
            self._without_place.append(place._entry)  # pyright: ignore[reportPrivateUsage]
            while len(self._without_place) > (0 if last else self._ahead):
                self._entries.append(self._without_place.popleft())
            mine = not self._broken and not self._posting
            self._posting = self._posting or mine
        if mine:
            self._go_on()  # the stage that has just got its place may have been ready before
        return place

    def abandon(self) -> None:
        """The lane is broken: nothing waits for its place any more, and every start will say so."""
        with self._lock:
            self._broken = True
            waiting = [*self._entries, *self._without_place]
            self._entries.clear()
            self._without_place.clear()
        for entry in waiting:
            if entry.start is not None:  # else its reduction's first stage fails, too
                _start(entry)

    def _fill(self, entry: _Entry, start: Start) -> LaneOperation:
        with self._lock:
            entry.start = start
            broken = self._broken
            mine = not broken and not self._posting
            self._posting = self._posting or mine
        if broken:
            _start(entry)
        elif mine:
            self._go_on()
        return entry.operation

    def _go_on(self) -> None:
        """Post what is ready, one after the other, outside the lock: an operation may end, and tell, at once."""
        while True:
            with self._lock:
                ready = not self._broken and self._entries and self._entries[0].start is not None
                if not ready:
                    self._posting = False
                    return
                entry = self._entries.popleft()
            _start(entry)


def _start(entry: _Entry) -> None:
    """Post it; the operation that was handed out ends with the one that is posted."""
    assert entry.start is not None
    posted = entry.start()

    def pass_on() -> None:
        entry.operation.finish(posted.error)

    posted.add_done_callback(pass_on)
