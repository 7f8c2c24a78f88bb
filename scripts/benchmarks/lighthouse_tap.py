"""Between members and a Lighthouse: passes on every stream, and counts what goes up and down by its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from lighthouse.pb import lighthouse_pb2 as pb
from lighthouse.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, SERVICE, SESSION

MAX_STREAMS = 8
STOP_GRACE_S = 1.0


class LighthouseTap:
    """Listens on a port of its own choice.

    Args:
        address: "host:port" of the Lighthouse.
    """

    def __init__(self, address: str) -> None:
        self._up: Counter[str] = Counter()
        self._down: Counter[str] = Counter()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._server = grpc.server(ThreadPoolExecutor(MAX_STREAMS), options=SERVER_OPTIONS)
        handlers = {"Session": grpc.stream_stream_rpc_method_handler(self._session)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Messages so far by kind: up, down."""
        return self._up.copy(), self._down.copy()

    def close(self) -> None:
        """End the streams."""
        self._server.stop(STOP_GRACE_S).wait()
        self._channel.close()

    def _session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        call: Any = self._channel.stream_stream(SESSION)(_counted(requests, pb.SessionUp, self._up))
        context.add_callback(call.cancel)
        yield from _counted(call, pb.SessionDown, self._down)


def _counted(messages: Iterator[bytes], kind: type[Any], counts: Counter[str]) -> Iterator[bytes]:
    for data in messages:
        counts[str(kind.FromString(data).WhichOneof("body"))] += 1
        yield data
