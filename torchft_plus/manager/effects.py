"""What the step core wants done. The agent carries effects out in order; nothing here does anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lighthouse.messages import Ask, Fault, Quorum
from torchft_plus.pb import peer_pb2 as pb


@dataclass(frozen=True, slots=True)
class SendUp:
    """To the Lighthouse."""

    message: Ask | Fault


@dataclass(frozen=True, slots=True)
class SendPeers:
    """To every other leader of the quorum's mesh."""

    quorum_id: int
    frame: pb.PeerFrame


@dataclass(frozen=True, slots=True)
class ConnectMesh:
    """Connect to the other leaders of ``quorum`` and exchange hellos; older meshes are closed."""

    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Tell:
    """To every rank of the group, the leader's own included."""

    word: pb.Word


@dataclass(frozen=True, slots=True)
class TellEach:
    """One word for each rank of the group, by group rank."""

    words: tuple[pb.Word, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """Into the event log and the log."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


Effect = SendUp | SendPeers | ConnectMesh | Tell | TellEach | Emit
