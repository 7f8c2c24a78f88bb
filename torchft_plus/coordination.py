"""torchft's module of this name."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc

import lighthouse.server
from lighthouse.pb import torchft_pb2 as pb
from lighthouse.rpc import call_metadata, open_channel, target_of
from lighthouse.security import Security
from torchft_plus.compat.absent import absent

DEFAULT_JOIN_TIMEOUT_MS = 100
"""As in torchft's class. The command ``torchft-plus lighthouse`` waits longer for the first quorum, unless it is told how
many replicas to expect."""


class LighthouseServer(lighthouse.server.LighthouseServer):
    """A Lighthouse in a thread of this process, with torchft's defaults; see ``lighthouse.server``.

    Args:
        bind: "host:port"; port 0 chooses a free one.
        min_replicas: no quorum has fewer members.
        join_timeout_ms: how long the first quorum waits for more than ``min_replicas``.
        quorum_tick_ms: at most so long between two looks at the clock.
        heartbeat_timeout_ms: silence after which a process is lost.
        options: further ones of ``lighthouse.server.LighthouseServer``.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        **options: Any,
    ) -> None:
        join = DEFAULT_JOIN_TIMEOUT_MS if join_timeout_ms is None else join_timeout_ms
        super().__init__(bind, min_replicas, join, quorum_tick_ms, heartbeat_timeout_ms, **options)


@dataclass(frozen=True)
class Timestamp:
    """A moment: seconds and nanoseconds since 1970, UTC."""

    seconds: int
    nanos: int


@dataclass(frozen=True)
class QuorumMember:
    """A replica in a quorum, as torchft's Lighthouse protocol has it.

    Args:
        replica_id: its name.
        address: of its manager's server.
        store_address: of its store.
        step: committed steps.
        world_size: ranks of the group.
        shrink_only: it wanted nobody new.
        data: what it gave about itself.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[Hashable, object] | None = None


@dataclass(frozen=True)
class Quorum:
    """An answer of torchft's Lighthouse protocol.

    Args:
        quorum_id: its number.
        participants: ordered by name.
        created: when it was first answered with.
    """

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


class LighthouseClient:
    """Speaks torchft's protocol to a Lighthouse: for tools that coordinate other things by it. A Manager needs none.

    Args:
        addr: "host:port" of the Lighthouse, with or without http://.
        connect_timeout: how long to look for it.

    Raises:
        ValueError: ``addr`` is no address.
        TimeoutError: it was not there in time.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._addr = addr
        security = Security.resolve()
        self._metadata = call_metadata(security)
        self._channel = open_channel(target_of(addr), security)
        try:
            grpc.channel_ready_future(self._channel).result(connect_timeout.total_seconds())
        except grpc.FutureTimeoutError as error:
            self._channel.close()
            raise TimeoutError(f"no Lighthouse at {addr} within {connect_timeout}") from error

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Hashable, object] | None = None,
    ) -> Quorum:
        """Ask for a quorum; blocks until there is one with this replica in it.

        Args:
            replica_id: name of the asking replica.
            timeout: how long to wait.
            address, store_address, step, world_size, shrink_only: what the others are to know; see ``QuorumMember``.
            data: anything that JSON can say.

        Raises:
            TimeoutError: there was none in time.
            RuntimeError: the Lighthouse refused, or is gone; the text says why.
        """
        member = pb.QuorumMember(
            replica_id=replica_id,
            address=address or "",
            store_address=store_address or "",
            step=step or 0,
            world_size=1 if world_size is None else world_size,
            shrink_only=bool(shrink_only),
            data="" if data is None else json.dumps(data),
        )
        request = pb.LighthouseQuorumRequest(requester=member)
        answer = pb.LighthouseQuorumResponse.FromString(self._call("Quorum", request, timeout)).quorum
        created = Timestamp(answer.created.seconds, answer.created.nanos)
        return Quorum(answer.quorum_id, [_member(one) for one in answer.participants], created)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Say that this replica lives.

        Args:
            replica_id: its name.
            timeout: how long to wait for the answer.

        Raises:
            TimeoutError, RuntimeError: as ``quorum``.
        """
        self._call("Heartbeat", pb.LighthouseHeartbeatRequest(replica_id=replica_id), timeout)

    def _call(self, method: str, request: Any, timeout: timedelta) -> bytes:
        call = self._channel.unary_unary(f"/torchft.LighthouseService/{method}")
        try:
            return call(request.SerializeToString(), timeout=timeout.total_seconds(), metadata=self._metadata)
        except grpc.RpcError as error:
            status: Any = error
            if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(
                    f"the Lighthouse at {self._addr} gave no answer within {timeout}"
                ) from error
            raise RuntimeError(f"the Lighthouse at {self._addr}: {status.details()}") from error


def _member(member: Any) -> QuorumMember:
    return QuorumMember(
        member.replica_id,
        member.address,
        member.store_address,
        member.step,
        member.world_size,
        member.shrink_only,
        json.loads(member.data) if member.data else None,
    )


__all__ = ["LighthouseClient", "LighthouseServer", "Quorum", "QuorumMember", "Timestamp"]


def __getattr__(name: str) -> Any:
    return absent(__name__, name)
