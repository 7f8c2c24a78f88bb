"""Which local address a backend binds to: always a numeric one, so that nobody asks a name server."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

ENVIRONMENT_VARIABLE = "TORCHFT_PLUS_BIND"
_SIOCGIFADDR = 0x8915  # Linux
_ANY_PORT = 9  # a datagram socket sends nothing on connect; the port is never used


def bind_address(store: Store) -> str:
    """Numeric address for the connections of a lane that meets its peers over ``store``.

    ``TORCHFT_PLUS_BIND`` if set; else the address from which this machine reaches a TCP store; else (a store
    of one machine) loopback.
    """
    configured = os.environ.get(ENVIRONMENT_VARIABLE)
    if configured:
        return numeric(configured)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    return local_address_towards(numeric(store.host))


def numeric(host: str) -> str:
    """``host`` if it is a numeric address, loopback for "localhost", the address of an interface ("eth0"), else one look-up.

    Raises:
        ValueError: the name is unknown, or the interface has no IPv4 address.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if any(host == name for _, name in socket.if_nameindex()):
        return _interface_address(host)
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(
            f"the address {host!r} is no numeric address and cannot be looked up ({error}): "
            f"set {ENVIRONMENT_VARIABLE} to this machine's numeric address"
        ) from error


def _interface_address(name: str) -> str:
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise ValueError(
                f"the interface {name!r} has no IPv4 address ({error.strerror}): "
                f"set {ENVIRONMENT_VARIABLE} to this machine's numeric address"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def local_address_towards(address: str) -> str:
    """The own address that the routing table picks for ``address``. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"
        return str(probe.getsockname()[0])
