"""One rank's desk in the agent thread: takes the leader's words to whoever acts on them."""

from __future__ import annotations

from torchft_plus.manager.control_words import to_head
from torchft_plus.manager.lanes import LaneBuilder
from torchft_plus.manager.mailbox import Mailbox
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.state.server import StateServer


class Desk:
    """Delivers words of the leader on one rank. What changes what the training thread does goes to its mailbox."""

    def __init__(
        self,
        mailbox: Mailbox,
        lanes: LaneBuilder,
        server: StateServer,
    ) -> None:
        self._mailbox = mailbox
        self._lanes = lanes
        self._server = server

    def deliver(self, word: pb.Word) -> None:
        """Act on a word (agent thread). Never blocks."""
        body = word.WhichOneof("body")
        if body == "configure":
            self._lanes.configure(word.configure)
            self._mailbox.put(word)
        elif body == "abort":
            self._lanes.abort(word.abort.quorum_id, word.abort.reason)
            self._mailbox.wake()
        elif body == "pin":
            head = to_head(word.pin.head)
            if word.pin.on:
                self._server.pin(head, word.pin.readers)
            else:
                self._server.unpin(head)
            self._mailbox.wake()  # a training thread that waits in a step may serve the pinned head at once
        else:
            self._mailbox.put(word)
