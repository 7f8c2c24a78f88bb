"""Where the training thread waits: the leader's words, ended operations and new lanes, under one condition."""

from __future__ import annotations

import threading
import time
from collections import deque

from torchft_plus.pb import peer_pb2 as pb


class Mailbox:
    """Words for the training thread, and one place to wait for anything that concerns it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._words: deque[pb.Word] = deque()
        self._signals = 0

    def put(self, word: pb.Word) -> None:
        """Add a word (agent thread)."""
        with self._condition:
            self._words.append(word)
            self._signals += 1
            self._condition.notify_all()

    def wake(self) -> None:
        """Something that is not a word has changed: an operation ended, a lane is ready (any thread)."""
        with self._condition:
            self._signals += 1
            self._condition.notify_all()

    def take(self) -> pb.Word | None:
        """The oldest word, or None."""
        with self._condition:
            return self._words.popleft() if self._words else None

    def take_if(self, body: str) -> pb.Word | None:
        """The oldest word if it is of this kind, or None."""
        with self._condition:
            if self._words and self._words[0].WhichOneof("body") == body:
                return self._words.popleft()
            return None

    def take_first(self, body: str) -> pb.Word | None:
        """The oldest word of this kind, before all others, or None."""
        with self._condition:
            for word in self._words:
                if word.WhichOneof("body") == body:
                    self._words.remove(word)
                    return word
            return None

    def mark(self) -> int:
        """A mark for ``wait``: read it before looking at what is waited for."""
        with self._condition:
            return self._signals

    def wait(self, mark: int, timeout_ms: int) -> bool:
        """Wait until something happened after ``mark``; False if nothing did within ``timeout_ms``."""
        end = time.monotonic() + timeout_ms / 1000
        with self._condition:
            while self._signals == mark:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
            return True
