"""Hosts for tests: network namespaces around one bridge, whose links can be cut, reset, made lossy or slow.

Needs root and Debian's iproute2, util-linux and iptables. Everything, the bridge too, lives in namespaces of its own, so that
the network of the machine is not touched; traffic goes to addresses of these namespaces only (there is no other route).
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PREFIX = "torchft-plus"
FOLDER = Path("/run/netns")
HUB = "hub"


class Network:
    """Namespaces for ``hosts``, all connected to each other; everything is gone after ``close``.

    Raises:
        OSError, subprocess.CalledProcessError: namespaces are not allowed here, or a tool is missing.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        remove_abandoned()
        self._addresses = {host: f"10.99.0.{number}" for number, host in enumerate(hosts, 1)}
        self._ports = {host: f"port{number}" for number, host in enumerate(hosts, 1)}
        try:
            self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        for host in [HUB, *self._addresses]:
            _run("ip", "netns", "add", _name(host))
            self._ip(host, "link", "set", "lo", "up")
        self._ip(HUB, "link", "add", "bridge0", "type", "bridge")
        self._ip(HUB, "link", "set", "bridge0", "up")
        for host, port in self._ports.items():
            self._ip(HUB, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", _name(host))
            self._ip(HUB, "link", "set", port, "master", "bridge0", "up")
            self._ip(host, "address", "add", f"{self._addresses[host]}/24", "dev", "eth0")
            self._ip(host, "link", "set", "eth0", "up")

    def close(self) -> None:
        """Remove all namespaces and what is in them. The processes in them must have ended."""
        for host in [HUB, *self._addresses]:
            if (FOLDER / _name(host)).exists():
                _run("ip", "netns", "delete", _name(host))

    def address(self, host: str) -> str:
        """The numeric address of ``host``."""
        return self._addresses[host]

    @staticmethod
    def enter(host: str) -> list[str]:
        """What to put before a command that is to run on ``host``; the process keeps its id."""
        return ["nsenter", f"--net={FOLDER / _name(host)}"]

    # --- faults: each lasts until ``heal`` ----------------------------------------------------------------------

    def unplug(self, host: str) -> None:
        """Cut ``host`` from everybody: its link goes down."""
        self._ip(HUB, "link", "set", self._ports[host], "down")

    def cut(self, host: str, others: Sequence[str]) -> None:
        """Nothing passes between ``host`` and ``others``, silently and in both directions."""
        for other in others:
            self._filter(host, "INPUT", "-s", self._addresses[other], "-j", "DROP")
            self._filter(host, "OUTPUT", "-d", self._addresses[other], "-j", "DROP")

    def reset(self, host: str, others: Sequence[str]) -> None:
        """Connections between ``host`` and ``others`` are reset at their next packet, on both sides."""
        reset = ["-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"]
        for other in others:
            self._filter(host, "INPUT", "-s", self._addresses[other], *reset)
            self._filter(host, "OUTPUT", "-d", self._addresses[other], *reset)

    def lose(self, host: str, share: float) -> None:
        """Packets to and from ``host`` are lost at random, this ``share`` of them in each direction."""
        loss = ["-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
        self._filter(host, "INPUT", "-i", "eth0", *loss)
        for other in self._addresses:
            if other != host:  # not in OUTPUT of the host itself: its kernel would know of each loss
                self._filter(other, "INPUT", "-s", self._addresses[host], *loss)

    def limit(self, host: str, bytes_per_s: int) -> None:
        """The link of ``host`` carries so much in each direction; at most 50 ms of it wait in the queue."""
        for place, device in ((host, "eth0"), (HUB, self._ports[host])):
            _run(
                "tc", "-n", _name(place), "qdisc", "add", "dev", device, "root",
                "tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "16kb", "latency", "50ms",
            )  # fmt: skip

    def heal(self) -> None:
        """All links are good again."""
        for host, port in self._ports.items():
            self._ip(HUB, "link", "set", port, "up")
            self._filter(host, None)
            for place, device in ((host, "eth0"), (HUB, port)):
                if "tbf" in _run("tc", "-n", _name(place), "qdisc", "show", "dev", device):
                    _run("tc", "-n", _name(place), "qdisc", "delete", "dev", device, "root")

    @staticmethod
    def _ip(host: str, *arguments: str) -> None:
        _run("ip", "-n", _name(host), *arguments)

    @classmethod
    def _filter(cls, host: str, chain: str | None, *rule: str) -> None:
        """Append a rule to ``chain``, or drop all rules."""
        change = ["-F"] if chain is None else ["-A", chain, *rule]
        _run(*cls.enter(host), "iptables", "-w", "10", *change)


@functools.cache
def why_impossible() -> str:
    """Why there can be no :class:`Network` on this machine; empty if there can."""
    missing = [tool for tool in ("ip", "tc", "nsenter", "iptables") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2, util-linux and iptables"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        network = Network(["a", "b"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are not allowed here: {error}"
    try:
        network.cut("a", ["b"])
        network.reset("a", ["b"])
        network.lose("a", 0.3)
        network.limit("a", 1_000_000)
        network.heal()
    except (OSError, subprocess.SubprocessError) as error:
        return f"this kernel cannot disturb a network: {error}"
    finally:
        network.close()
    return ""


def remove_abandoned() -> None:
    """Remove namespaces of test runs that were killed."""
    for path in FOLDER.glob(f"{PREFIX}-*") if FOLDER.is_dir() else ():
        owner = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _run("ip", "netns", "delete", path.name)


def _name(host: str) -> str:
    return f"{PREFIX}-{os.getpid()}-{host}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
