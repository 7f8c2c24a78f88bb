"""The TCP connections of one gloo group, found from the addresses that gloo publishes in the store.

gloo cannot be aborted: a pending operation ends with its timeout, or when one of its connections breaks.
So a group is aborted by breaking its own connections. Each rank's record in the store (key ``0/{rank}``: host
name, ``sockaddr`` of its listener, pair numbers, each with its length before it) names that rank's listener.
The connections of the group are those with the own listener's port as local or a peer's listener as remote
address. The format is gloo's own: what is not understood counts as "not found"; the caller falls back.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LENGTH = struct.Struct("<Q")
_MAX_HOST_NAME_BYTES = 1024
Endpoint = tuple[str, int]
"""Numeric address and port."""


def parse_listener(record: bytes) -> Endpoint | None:
    """The listening address in one rank's store record, or None if the record is not as expected."""
    try:
        (host_bytes,) = _LENGTH.unpack_from(record, 0)
        if host_bytes > _MAX_HOST_NAME_BYTES:
            return None
        at = _LENGTH.size + host_bytes
        (address_bytes,) = _LENGTH.unpack_from(record, at)
        at += _LENGTH.size
        if at + address_bytes > len(record):
            return None
        return _parse_sockaddr(record[at : at + address_bytes])
    except struct.error:
        return None


def _parse_sockaddr(address: bytes) -> Endpoint | None:
    (family,) = struct.unpack_from("=H", address, 0)
    (port,) = struct.unpack_from("!H", address, 2)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, address[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, address[8:24]), port
    return None


@dataclass(frozen=True, slots=True)
class Connection:
    """A duplicate of one connection of the group, ours to shut down and to close."""

    socket: socket.socket
    peer_rank: int | None
    """Known for those that this rank opened."""

    def is_broken(self) -> bool:
        """True if the other end has closed or reset it (also if data is still unread)."""
        poller = select.poll()
        poller.register(self.socket, select.POLLRDHUP)
        return bool(poller.poll(0))


class GroupSockets:
    """Duplicates of all connections of one group of one rank, taken once the group is connected.

    Duplicates, because gloo closes its own descriptors when a peer breaks first, and numbers are used again.
    """

    def __init__(self, connections: Iterable[Connection]) -> None:
        self._connections = tuple(connections)

    def __len__(self) -> int:
        return len(self._connections)

    def shut_down(self) -> None:
        """End every connection, in both directions: pending operations fail here and at the peers."""
        for connection in self._connections:
            try:
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the peer was first, or it is closed already

    def wait_broken(self) -> None:
        """Block until one of the connections is broken, by its other end or by ``shut_down``."""
        poller = select.poll()
        for connection in self._connections:
            poller.register(connection.socket, select.POLLRDHUP)
        poller.poll()

    def broken_peer(self) -> int | None:
        """Rank of the peer if exactly one connection was broken by its other end, and its rank is known.

        With several, an innocent one may have aborted in answer to the guilty one, and nobody is named.
        """
        broken = [connection for connection in self._connections if connection.is_broken()]
        return broken[0].peer_rank if len(broken) == 1 else None

    def leave_to_parent(self) -> None:
        """In a forked child (a data loader's worker): let go of the connections without ending them.

        Otherwise the peers would not see the parent's death as long as the child lives. gloo's own descriptors keep
        their numbers, so that nothing closes somebody else's.
        """
        inodes = {os.fstat(connection.socket.fileno()).st_ino for connection in self._connections}
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _descriptors():
            try:
                if os.fstat(descriptor).st_ino in inodes:
                    os.dup2(nothing, descriptor, inheritable=False)
            except OSError:
                continue  # the folder's own descriptor
        os.close(nothing)

    def close(self) -> None:
        """Give the duplicates back."""
        for connection in self._connections:
            connection.socket.close()


def find_sockets(listeners: Mapping[int, Endpoint], own_rank: int) -> GroupSockets:
    """Look through this process's sockets for the connections of one group.

    Args:
        listeners: listening address of every rank of the group.
        own_rank: this rank.
    """
    own_port = listeners[own_rank][1]
    rank_of = {endpoint: rank for rank, endpoint in listeners.items() if rank != own_rank}
    connections: list[Connection] = []
    for descriptor in _descriptors():
        # The list holds the number of the folder that was read, which the first duplicate may have got since.
        if any(descriptor == found.socket.fileno() for found in connections):
            continue
        duplicate = _duplicate_tcp(descriptor)
        if duplicate is None:
            continue
        local, remote = duplicate.getsockname(), _peer(duplicate)
        peer_rank = rank_of.get((str(remote[0]), int(remote[1]))) if remote else None
        if remote and (local[1] == own_port or peer_rank is not None):
            sole_peer = next(iter(rank_of.values())) if len(rank_of) == 1 else None
            connections.append(Connection(duplicate, peer_rank if peer_rank is not None else sole_peer))
        else:
            duplicate.close()
    return GroupSockets(connections)


def _descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return []


def _duplicate_tcp(descriptor: int) -> socket.socket | None:
    """Duplicate first, look afterwards: the number may be closed and used again at any time."""
    try:
        number = os.dup(descriptor)
    except OSError:
        return None
    try:
        duplicate = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
        return duplicate
    duplicate.close()
    return None


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    try:
        name = connection.getpeername()
    except OSError:  # a listener
        return None
    return str(name[0]), int(name[1])
