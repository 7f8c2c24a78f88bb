"""What a Manager needs to know about its place: arguments first, then the environment of torchrun and torchft."""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from lighthouse.rpc import parse_address
from lighthouse.security import Security, SecurityError
from lighthouse.timeouts import DEFAULT_TIMEOUT_MS, Timeouts
from torchft_plus.process_group.bind import numeric

NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")


class SettingsError(ValueError):
    """A setting is missing or wrong; the message names it and the mend."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where this rank stands and whom it talks to."""

    lighthouse_address: str
    replica_id: str
    incarnation: str
    job_id: str
    group_rank: int
    group_world_size: int
    store_address: str
    """Store of the group's ranks (torchrun's), "host:port"; empty for a group of one."""
    store_prefix: str
    bind_host: str
    min_replica_size: int
    timeouts: Timeouts
    security: Security

    @classmethod
    def resolve(
        cls,
        *,
        min_replica_size: int,
        replica_id: str | None = None,
        lighthouse_address: str | None = None,
        job_id: str | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        store_host: str | None = None,
        store_port: int | None = None,
        bind_host: str | None = None,
        timeout_ms: int | None = None,
        outage_limit_ms: int | None = None,
        security: Security | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Settings:
        """Fill what is not given from the environment.

        Raises:
            SettingsError: something is missing or no two values of it fit.
        """
        env = os.environ if environment is None else environment
        lighthouse_address = lighthouse_address or env.get("TORCHFT_LIGHTHOUSE", "")
        if not lighthouse_address:
            raise SettingsError(
                "no Lighthouse: set TORCHFT_LIGHTHOUSE=host:port, or pass lighthouse_addr "
                "(start one with `torchft-plus lighthouse --min_replicas 1`)"
            )
        rank = _integer(env, "RANK", 0) if group_rank is None else group_rank
        world_size = _integer(env, "WORLD_SIZE", 1) if group_world_size is None else group_world_size
        if not 0 <= rank < world_size:
            raise SettingsError(
                f"rank {rank} is not within a group of WORLD_SIZE {world_size}: set RANK below it"
            )
        host = store_host or env.get("MASTER_ADDR", "")
        port = _integer(env, "MASTER_PORT", 0) if store_port is None else store_port
        if world_size > 1 and not (host and port):
            raise SettingsError(
                "MASTER_ADDR and MASTER_PORT are needed to find the other ranks of the group: start it by torchrun"
            )
        name = replica_id or env.get("REPLICA_ID") or f"replica_{uuid.uuid4().hex[:8]}"
        job = job_id or env.get("TORCHFT_PLUS_JOB_ID") or "default"
        for field, value in (("replica_id", name), ("job_id", job)):
            if not NAME.fullmatch(value):
                raise SettingsError(f"{field} {value!r} is not 1 to 128 letters, digits or _.:@-")
        if min_replica_size < 1:
            raise SettingsError(f"min_replica_size is {min_replica_size}: it must be at least 1")
        try:
            timeouts = Timeouts(
                timeout_ms
                if timeout_ms is not None
                else _integer(env, "TORCHFT_PLUS_TIMEOUT_MS", DEFAULT_TIMEOUT_MS),
                **({} if outage_limit_ms is None else {"outage_limit_ms": outage_limit_ms}),
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error
        try:
            security = Security.resolve(env) if security is None else security
        except SecurityError as error:
            raise SettingsError(str(error)) from error
        return cls(
            lighthouse_address=lighthouse_address,
            replica_id=name,
            incarnation=env.get("TORCHFT_PLUS_INCARNATION") or uuid.uuid4().hex,
            job_id=job,
            group_rank=rank,
            group_world_size=world_size,
            store_address=f"{host}:{port}" if world_size > 1 else "",
            store_prefix=f"torchft_plus/{name}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            bind_host=_bind_host(bind_host or env.get("TORCHFT_PLUS_BIND"), lighthouse_address),
            min_replica_size=min_replica_size,
            timeouts=timeouts,
            security=security,
        )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise SettingsError(f"{name} is {text!r}: it must be a whole number") from None


def _bind_host(wanted: str | None, lighthouse_address: str) -> str:
    if not wanted:
        return _own_host(lighthouse_address)
    try:
        return numeric(wanted)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _own_host(lighthouse_address: str) -> str:
    """The numeric address of the interface that leads to the Lighthouse: loopback when the run is local.

    Numeric, because a resolver that drops a query costs seconds now and then.
    """
    try:
        host, port = parse_address(lighthouse_address)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: asks the kernel for the route
            return probe.getsockname()[0]
    except (ValueError, OSError) as error:
        raise SettingsError(f"Lighthouse address {lighthouse_address!r}: {error}; write host:port") from error
