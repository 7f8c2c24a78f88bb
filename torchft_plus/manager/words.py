"""Short forms for words that are built in several places."""

from __future__ import annotations

from torchft_plus.pb import peer_pb2 as pb


def fatal(reason: str) -> pb.Word:
    """This group cannot go on."""
    return pb.Word(fatal=pb.WordFatal(reason=reason))
