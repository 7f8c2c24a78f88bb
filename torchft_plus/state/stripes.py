"""Which pieces of a version are wanted, under way and verified. Pure but for its lock."""

from __future__ import annotations

import threading

from torchft_plus.state.manifest import PIECE_BYTES

MAX_STRIPE_PIECES = 8
"""32 MiB: long enough to hide a round trip, and what others wait for at the end if its donor slows down."""
_SHARE = 4


class Stripes:
    """Hands out ranges of pieces to the connections, largest first, and takes back what failed.

    Args:
        size_bytes: size of the data.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._changed = threading.Condition()
        pieces = -(-size_bytes // PIECE_BYTES)
        self._wanted: list[tuple[int, int]] = [(0, pieces)] if pieces else []
        self._under_way = 0
        self._idle = 0
        self._left = pieces
        self._verified: list[tuple[int, int]] = []
        self._verified_bytes = 0
        self._refetched_bytes = 0
        self._stopped = False

    @property
    def complete(self) -> bool:
        """Every piece is verified."""
        return self._left == 0

    @property
    def verified_bytes(self) -> int:
        """Bytes of the verified pieces."""
        return self._verified_bytes

    @property
    def refetched_bytes(self) -> int:
        """Bytes that were received and have to be received again."""
        return self._refetched_bytes

    @property
    def idle(self) -> int:
        """How many connections wait because all that is left is under way on others."""
        return self._idle

    def take(
        self,
        connections: int,
        least_pieces: int = 1,
        most_pieces: int = MAX_STRIPE_PIECES,
        *,
        wait: bool = True,
    ) -> tuple[int, int] | None:
        """A range of pieces to fetch: a quarter of a fair share, so that slower ones get less in the end. Who works alone
        gets all it may.

        Args:
            connections: how many share the work.
            least_pieces: for a connection that is known to be fast, which small stripes would cost more than waiting;
                but no more than a fair share.
            most_pieces: bound for a connection that is known to be slow.
            wait: while all that is left is under way elsewhere and might come back, wait for that.

        Returns:
            First piece and the one behind the last; None when there is nothing more to do, or, without
            ``wait``, nothing at the moment.
        """
        with self._changed:
            while wait and not self._wanted and self._under_way and not self._stopped:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if not self._wanted or self._stopped:
                return None
            first, last = self._wanted.pop()
            waiting = last - first + sum(end - start for start, end in self._wanted)
            share = waiting if connections == 1 else waiting // (_SHARE * connections)
            count = max(min(least_pieces, waiting // connections), share, 1)
            count = min(count, most_pieces, last - first)
            if first + count < last:
                self._wanted.append((first + count, last))
            self._under_way += 1
            return first, first + count

    def settle(self, first: int, last: int, bad: list[int], received_bytes: int) -> None:
        """A range that was taken is done.

        Args:
            first: as taken.
            last: as taken.
            bad: pieces of it that are wanted again; all others are verified.
            received_bytes: what was received of it.
        """
        with self._changed:
            good_bytes = 0
            start = first
            for piece in [*sorted(bad), last]:
                if start < piece:
                    span = (start * PIECE_BYTES, min(piece * PIECE_BYTES, self.size_bytes))
                    self._verified.append(span)
                    good_bytes += span[1] - span[0]
                    self._left -= piece - start
                if piece < last:
                    self._wanted.append((piece, piece + 1))
                start = piece + 1
            self._verified_bytes += good_bytes
            self._refetched_bytes += max(0, received_bytes - good_bytes)
            self._under_way -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def verified_since(self, count: int) -> list[tuple[int, int]]:
        """Data bytes that were verified, from the ``count``-th range on, in the order in which it
        happened."""
        with self._changed:
            return self._verified[count:]
