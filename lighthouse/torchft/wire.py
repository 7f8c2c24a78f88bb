"""Conversion between torchft's protobuf messages and plain values, checked."""

from __future__ import annotations

from lighthouse import wire
from lighthouse.pb import torchft_pb2 as pb
from lighthouse.torchft.words import Participant

MAX_DATA_CHARS = 65_536


def question_in(data: bytes) -> Participant:
    """The requester of a Quorum call; raises WireError."""
    try:
        request = pb.LighthouseQuorumRequest.FromString(data)
    except wire.DecodeError as error:
        raise wire.WireError(f"the request is no valid LighthouseQuorumRequest: {error}") from error
    if not request.HasField("requester"):
        raise wire.WireError("requester is missing: say who asks")
    member = request.requester
    for name in ("address", "store_address", "data"):
        limit = MAX_DATA_CHARS if name == "data" else wire.MAX_ADDRESS_CHARS
        if len(getattr(member, name)) > limit:
            raise wire.WireError(f"requester.{name} has more than {limit} characters")
    return Participant(
        wire.name_in(member.replica_id, "requester.replica_id"),
        member.address,
        member.store_address,
        wire.number_in(member.step, "requester.step"),
        wire.number_in(member.world_size, "requester.world_size"),
        member.shrink_only,
        member.data,
        max(0, member.commit_failures),
    )


def heartbeat_in(data: bytes) -> str:
    """The replica_id of a heartbeat; raises WireError."""
    try:
        replica_id = pb.LighthouseHeartbeatRequest.FromString(data).replica_id
    except wire.DecodeError as error:
        raise wire.WireError(f"the request is no valid LighthouseHeartbeatRequest: {error}") from error
    return wire.name_in(replica_id, "replica_id")


def answer_out(quorum_id: int, participants: tuple[Participant, ...], created_s: float) -> bytes:
    """A quorum, as the response to all of its members; ``created_s`` is Unix time."""
    quorum = pb.Quorum(quorum_id=quorum_id)
    quorum.created.FromNanoseconds(int(created_s * 1e9))
    for one in participants:
        quorum.participants.add(
            replica_id=one.replica_id,
            address=one.address,
            store_address=one.store_address,
            step=one.step,
            world_size=one.world_size,
            shrink_only=one.shrink_only,
            data=one.data,
            commit_failures=one.commit_failures,
        )
    return pb.LighthouseQuorumResponse(quorum=quorum).SerializeToString()
