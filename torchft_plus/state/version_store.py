"""Which versions exist: published, pinned, asked for, kept, dropped. Thread-safe; no sockets."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import torch

from lighthouse.messages import Head
from torchft_plus.state.errors import StateError
from torchft_plus.state.manifest import head_name
from torchft_plus.state.registry import StateRegistry
from torchft_plus.state.room import LEAST_BYTES, Layout, Room
from torchft_plus.state.version import Pin, Version

_MAX_PINS = 16
_MAX_COPIES = 2
_CLOSE_DEADLINE_S = 30.0
_log = logging.getLogger(__name__)


class NotServed(StateError):
    """The version is not served and will not be."""


class NotYetServed(StateError):
    """The version may still be served, at the next boundary."""


class VersionStore:
    """Versions of one rank's state.

    Capturing a version costs milliseconds, so it is done only for heads that somebody wants: ``publish``
    marks the head, and captures it if it is pinned or asked for. A head that is pinned too late for that is
    captured at the next ``publish`` of the same head, or at the latest by ``before_update``.

    Its threads make room for copies from the ``pin`` on, copy ahead and give memory back; each ends with what it was started
    for, ``close`` waits for them.

    Args:
        registry: the state.
        linger_ms: a pin is void when no reader was active for so long.
        clock: monotonic seconds.
    """

    def __init__(
        self, registry: StateRegistry, linger_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.changed = threading.Condition()
        self._registry = registry
        self._linger = linger_ms / 1000
        self._clock = clock
        self._published: Head | None = None
        self._changing = False
        self._wishes: deque[tuple[Head, int | None]] = deque()
        """Heads to pin for so many readers, or, with None, to unpin; taken up by whoever holds the lock
        next."""
        self._pins: dict[Head, Pin] = {}
        self._versions: dict[Head, Version] = {}
        self._dropped: OrderedDict[Head, str] = OrderedDict()
        self._helpers: set[threading.Thread] = set()
        self._layout: Layout | None = None
        """Of the state after an update (an optimizer makes its state in the first one); None: not known yet."""
        self._updated = False
        self._room: Room | None = None
        """Is being made for a head that is pinned and not captured yet."""
        self._closed = False

    # --- training side ---

    def publish(self, head: Head, *, update_follows: bool = False) -> None:
        """The registered state is that of ``head``. Training thread; see ``StateServer.publish``."""
        if not self._registry.holds_state:
            raise StateError(
                f"version {head_name(head)} cannot be published: a fetch has begun and is not applied"
            )
        with self.changed:
            self._published = head
            self._changing = False
            if self._layout is None and self._updated:
                self._layout = self._lay_out()
            if self._is_asked:
                self._dropped.pop(head, None)
                self._serve_point()
            if update_follows:
                self._copy_ahead()

    def before_update(self) -> int:
        """The registered state is about to change. Training thread; gives the number of bytes copied."""
        with self.changed:
            self._updated = True
            if self._changing or not self._is_asked:
                self._changing = True
                return 0
            self._serve_point()
            versions = [version for version in self._versions.values() if version.live]
        copied_bytes = sum(self._detach(version) for version in versions)
        with self.changed:
            self._changing = True
            self._sweep()
            self.changed.notify_all()
            return copied_bytes

    def pin(self, head: Head, readers: int = 1) -> None:
        """``readers`` readers will come for ``head``. Any thread; never blocks, for agents that answer
        heartbeats."""
        self._wishes.append((head, readers))
        layout = self._layout
        if layout is not None and layout.host_bytes >= LEAST_BYTES and not self._closed:
            self._help(lambda: self._make_room(head, layout), f"making room for version {head_name(head)}")

    def unpin(self, head: Head) -> None:
        """Nobody will come for ``head`` any more; responses under way are completed. Any thread; never
        blocks."""
        self._wishes.append((head, None))

    def withdraw(self) -> None:
        """Nothing is served until the next ``publish``; responses under way break off. Any thread."""
        with self.changed:
            for version in self._versions.values():
                self._forget_memory(version.drop())
            self._wishes.clear()
            self._versions.clear()
            self._pins.clear()
            self._dropped.clear()
            self._let_go_of_room()
            self._published = None
            self.changed.notify_all()

    def close(self) -> None:
        """Serve nothing and end the threads that make room, copy and free. Any thread."""
        self._closed = True
        self.withdraw()
        with self.changed:
            helpers = list(self._helpers)
        deadline = time.monotonic() + _CLOSE_DEADLINE_S
        for helper in helpers:
            helper.join(max(0.0, deadline - time.monotonic()))

    def _copy_ahead(self) -> None:
        for version in self._versions.values():
            if version.live and not version.copies_ahead:
                version.copies_ahead = True
                self._help(version.copy_ahead, f"copying version {head_name(version.head)} ahead")

    def _make_room(self, head: Head, layout: Layout) -> None:
        with self.changed:
            waited_for = head not in self._versions and self._why_never(head) is None
            if self._closed or self._room is not None or not waited_for:
                return
            room = self._room = Room(layout)
        room.make()

    def _forget_memory(self, kept: list[object]) -> None:
        if kept:
            self._help(kept.clear, "freeing a version")

    def _help(self, call: Callable[[], object], what: str) -> None:
        """Do something on a thread that ends with it. Never blocks."""
        helper = threading.Thread(
            target=self._run_helper, args=(call, what), name="state-helper", daemon=True
        )
        self._helpers.add(helper)
        try:
            helper.start()
        except RuntimeError as error:  # no more threads: the training thread does it when it must
            self._helpers.discard(helper)
            _log.warning("%s failed: %s", what, error)

    def _run_helper(self, call: Callable[[], object], what: str) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - before_update copies what is missing, and what fails there counts
            _log.warning("%s failed: %s: %s", what, type(error).__name__, error)
        finally:
            with self.changed:
                self._helpers.discard(threading.current_thread())

    def _detach(self, version: Version) -> int:
        with self.changed:
            self._expire(version.head)
            if not version.is_held() and (
                version.pin is None or not version.pin.needs(0, version.size_bytes)
            ):
                self._drop(version, "its readers had all they needed, or none came in time")
                return 0
        try:
            copied_bytes = version.detach()
        except (
            MemoryError,
            RuntimeError,
            TimeoutError,
        ) as error:  # RuntimeError: the CPU's allocator has no room
            _log.warning("version %s cannot be kept: %s", head_name(version.head), error)
            self._drop(version, f"it could not be kept when training went on: {error}")
            return 0
        with self.changed:
            copies = [other for other in self._versions.values() if not other.live]
            for other in copies[:-_MAX_COPIES]:
                self._drop(other, f"{_MAX_COPIES} newer versions are kept")
        return copied_bytes

    # --- readers' side ---

    def acquire(self, head: Head, wait_ms: int, reader: str | None) -> Version:
        """The version of ``head``, waiting for the training thread to reach a boundary with it if it still
        can.

        Args:
            head: what is asked for; asking pins it for a while.
            wait_ms: how long to wait at most.
            reader: name of a reader that will release what it has, or None.

        Raises:
            NotServed: it is gone, or the replica serves nothing.
            NotYetServed: the time is over.
        """
        deadline = time.monotonic() + wait_ms / 1000
        with self.changed:
            while True:
                self._fulfil_wishes()
                reason = self._why_never(head)
                if reason is not None:
                    raise NotServed(f"version {head_name(head)} is not served: {reason}")
                pin = self._pins.get(head)
                version = self._versions.get(head)
                if pin is None:
                    if len(self._pins) >= _MAX_PINS:
                        raise NotServed(
                            f"version {head_name(head)} is not served: {_MAX_PINS} others are waited for"
                        )
                    pin = self._add_pin(head)
                pin.deadline = self._clock() + self._linger
                if version is not None:
                    if reader is not None:
                        version.add_reader(reader)
                    return version
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NotYetServed(f"version {head_name(head)} is not served yet: {self._describe()}")
                self.changed.wait(left)

    def served(self) -> tuple[Head | None, tuple[Head, ...]]:
        """The head that was published last, and the heads of the versions that can be read at once."""
        with self.changed:
            self._fulfil_wishes()
            return self._published, tuple(self._versions)

    # --- holding the lock ---

    @property
    def _is_asked(self) -> bool:
        return bool(self._wishes or self._pins or self._versions or self._room)

    def _lay_out(self) -> Layout:
        # What nobody asked for must cost nothing: a user's callable may take seconds to make its state (where there is
        # one, the others wait for a joiner's download in any case).
        if self._registry.obstacles_to_catch_up():
            return Layout(0, ())
        try:
            return Layout.of(self._registry.snapshot().specs())
        except Exception as error:  # noqa: BLE001 - a registered callable of the user; who reads the state will be told
            _log.debug("no room is made ahead for copies of the state: %s", error)
            return Layout(0, ())

    def _take_room(self) -> torch.Tensor | None:
        """What there is of it: readers begin, and the processor is theirs and the step's."""
        room, self._room = self._room, None
        if room is None:
            return None
        room.stop()
        return room.block

    def _let_go_of_room(self) -> None:
        block = self._take_room()
        if block is not None:
            self._forget_memory([block])

    def _why_never(self, head: Head) -> str | None:
        if head in self._versions:
            return None
        if head in self._dropped:
            return self._dropped[head]
        published = self._published
        if published is None or (head == published and not self._changing):
            return None
        if head == published or head.order <= published.order:
            return f"nobody had asked for it when training went on; {self._describe()}"
        return None

    def _describe(self) -> str:
        names = ", ".join(head_name(head) for head in self._versions) or "no version"
        published = "none" if self._published is None else head_name(self._published)
        return f"this replica serves {names} and published {published} last"

    def _fulfil_wishes(self) -> None:
        while self._wishes:
            head, readers = self._wishes.popleft()
            if readers is not None:
                pin = self._pins.get(head) or self._add_pin(head)
                pin.expected = max(pin.expected, readers)
                continue
            self._pins.pop(head, None)
            version = self._versions.get(head)
            if version is not None:
                version.pin = None
            self._sweep()

    def _add_pin(self, head: Head) -> Pin:
        pin = self._pins[head] = Pin(0, self._clock() + self._linger)
        self._dropped.pop(head, None)
        version = self._versions.get(head)
        if version is not None:
            version.pin = pin
        return pin

    def _serve_point(self) -> None:
        self._fulfil_wishes()
        self._sweep()
        self.changed.notify_all()
        head = self._published
        if head is None or head in self._versions or head not in self._pins:
            return
        self._capture(head)

    def _capture(self, head: Head) -> None:
        try:
            snapshot = self._registry.snapshot()
            version = Version(head, snapshot, self._registry.signature(), self.changed, self._take_room())
        except Exception as error:  # noqa: BLE001 - a registered callable of the user: a donor never pays for a joiner
            _log.exception("the state of version %s cannot be served", head_name(head))
            self._pins.pop(head, None)
            self._forget(head, f"its state could not be read: {type(error).__name__}: {error}")
            return
        self._layout = version.layout()
        version.pin = self._pins[head]
        self._versions[head] = version

    def _sweep(self) -> None:
        for head in list(self._pins):
            self._expire(head)
            if head not in self._versions and self._why_never(head) is not None:
                self._pins.pop(head, None)
        if not self._wishes and not self._pins.keys() - self._versions.keys():
            self._let_go_of_room()
        for version in list(self._versions.values()):
            needed = version.pin is not None and version.pin.needs(0, version.size_bytes)
            if not needed and not version.is_held() and version.head != self._published:
                self._drop(version, "its readers had all they needed, or none came in time")

    def _expire(self, head: Head) -> None:
        pin = self._pins.get(head)
        version = self._versions.get(head)
        if pin is None:
            return
        if version is not None and version.is_held():
            pin.deadline = self._clock() + self._linger
        elif pin.deadline < self._clock():
            del self._pins[head]
            if version is not None:
                version.pin = None

    def _drop(self, version: Version, reason: str) -> None:
        with self.changed:
            self._forget_memory(version.drop())
            if self._versions.get(version.head) is version:  # else it was withdrawn meanwhile
                del self._versions[version.head]
                self._pins.pop(version.head, None)
                self._forget(version.head, reason)

    def _forget(self, head: Head, reason: str) -> None:
        self._dropped[head] = reason
        while len(self._dropped) > _MAX_PINS:
            self._dropped.popitem(last=False)
        self.changed.notify_all()
