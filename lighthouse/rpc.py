"""What Lighthouse and clients have in common about gRPC: method names, channel options, addresses."""

from __future__ import annotations

import ipaddress

import grpc

from lighthouse.security import HANDSHAKE_DEADLINE_S, Security, Tls
from lighthouse.wire import MAX_MESSAGE_BYTES

SERVICE = "torchft_plus.v1.Lighthouse"
SESSION = f"/{SERVICE}/Session"
STATUS = f"/{SERVICE}/Status"
REPORT_EXIT = f"/{SERVICE}/ReportExit"
DEFAULT_PORT = 29510

_SIZES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # It would send a ping with nearly every heartbeat, to measure a bandwidth that nobody needs: a third of their cost.
    ("grpc.http2.bdp_probe", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    # A Lighthouse is a neighbour: a proxy meant for the internet must not come between.
    ("grpc.enable_http_proxy", 0),
    # A new channel means a new connection at once, not one that shares another channel's backoff.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    # Two Lighthouses on one port would each get half of the replicas.
    ("grpc.so_reuseport", 0),
    # Who connects and says nothing must not keep a descriptor for long.
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_DEADLINE_S)),
]


def open_channel(target: str, security: Security) -> grpc.Channel:
    """A channel to ``target`` (see ``target_of``), with the process's certificate if it has one."""
    if security.tls is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    tls = security.tls
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.authority.read_bytes(),
        private_key=tls.key.read_bytes(),
        certificate_chain=tls.certificate.read_bytes(),
    )
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", tls.name)]
    return grpc.secure_channel(target, credentials, options=options)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Asks callers for a certificate of the run's authority."""
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return grpc.ssl_server_credentials(
        [pair], root_certificates=tls.authority.read_bytes(), require_client_auth=True
    )


def call_metadata(security: Security) -> tuple[tuple[str, str], ...] | None:
    """What goes with every call."""
    return (("authorization", security.authorization),) if security.token else None


def is_loopback(host: str) -> bool:
    """Nobody on another machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port", "http://host:port" (or https) or "[::1]:port" into host (without brackets) and port.

    Raises:
        ValueError: with one sentence, if it is none of them.
    """
    text = address.removeprefix("http://").removeprefix("https://").removesuffix("/")
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = host and not any(c in host for c in "[]/ @") and (bracketed or ":" not in host)
    if not (colon and plain and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{address!r} is no address: give host:port, http://host:port or [ipv6]:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Host and port as one address; IPv6 hosts get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target_of(address: str) -> str:
    """The gRPC target of an address in any of the forms of ``parse_address``; raises ValueError."""
    host, port = parse_address(address)
    if port == 0:
        raise ValueError(f"{address!r} has port 0: give the port on which the Lighthouse listens")
    return join_address(host, port)
