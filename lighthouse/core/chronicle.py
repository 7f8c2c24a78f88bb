"""What people are told: the log, the story, announcements, and for whom a round waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from lighthouse.core.roster import Roster
from lighthouse.core.words import Note, Send
from lighthouse.messages import Announce

STORY_LINES = 200


class Chronicle:
    """Writes into the roster's list of effects."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._story: deque[str] = deque(maxlen=STORY_LINES)
        self._announced = ""
        self._waiting_since_ms = 0
        self.waiting = ""
        """For whom or what the round waits; empty: for nobody."""

    def story(self) -> list[str]:
        """The last decisions, one sentence each."""
        return list(self._story)

    def tell(self, text: str, kind: str = "", fields: Mapping[str, Any] | None = None) -> None:
        """One sentence into story and log, with ``kind`` into the event log too."""
        self._story.append(f"{self._roster.wakeups.now_ms} ms: {text}")
        self._roster.effects.append(Note(text, kind, dict(fields or {})))

    def announce(self, text: str) -> None:
        """One sentence to everybody who is there."""
        message = Announce(text)
        for peer in self._roster.peers.values():
            if peer.connected:
                self._roster.effects.append(Send(peer.process, peer.session, message))
        self.tell(text, "announce", {"text": text})

    def wait(self, text: str) -> None:
        """Note for whom or what the round waits."""
        if text != self.waiting:
            self.waiting, self._waiting_since_ms, self._announced = text, self._roster.wakeups.now_ms, ""
            if text:
                self._story.append(f"{self._roster.wakeups.now_ms} ms: waiting {text}")

    def announce_wait(self) -> None:
        """Whoever has waited for as long as a silent member takes to be lost is told for whom."""
        if not self.waiting or self.waiting == self._announced:
            return
        if self._roster.wakeups.due(
            self._waiting_since_ms + self._roster.config.timeouts.heartbeat_timeout_ms
        ):
            self._announced = self.waiting
            self.announce(f"no new quorum yet: waiting {self.waiting}")
