"""``bench lighthouse``: what a Lighthouse costs, and how fast it is, with up to thousands of replica groups.

Members are light clients in one process (``light_members``); torchft's Lighthouse gets members that speak with torchft's own
client (``torchft_members``). Rounds of both are the same: all ask at once, and the round ends when everybody has the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, Child, Worker, environment
from benchmarks.figures import quantile
from benchmarks.lighthouse_tap import LighthouseTap
from benchmarks.machine import OtherLoad, process_s
from lighthouse.timeouts import Timeouts

GROUPS = (16, 128, 512, 1024, 4096)
TORCHFT_GROUPS = (16, 128, 512)
"""Its client needs two threads and connections a member."""
STEPS = 2000
COMMAND_DEADLINE_S = 400.0
TORCHFT_LOSSES = 3
"""Each takes its heartbeat timeout of 5 s, whatever else happens."""


@dataclass(slots=True)
class Load:
    """What was measured with one number of groups on one system. CPU in seconds of one core."""

    system: str
    groups: int
    connect_ms: float = 0.0
    connect_cpu_s: float = 0.0
    rest_share: float = 0.0
    """CPU of the server at rest, as a share of a core."""
    rest_client_share: float = 0.0
    round_ms: list[float] = field(default_factory=list[float])
    round_cpu_s: float = 0.0
    """CPU of the server, a round."""
    round_client_cpu_s: float = 0.0
    reported_ms: list[float] = field(default_factory=list[float])
    broken_ms: list[float] = field(default_factory=list[float])
    join_ms: list[float] = field(default_factory=list[float])
    other_load_cores: float = 0.0


@dataclass(slots=True)
class Pair:
    """A Lighthouse and the process with its members."""

    server: Child
    members: Worker

    def do(self, name: str, **arguments: Any) -> tuple[dict[str, float], float]:
        """Carry out a command. Returns its answer, and the CPU seconds of the server meanwhile."""
        before_s = process_s(self.server.process.pid)
        self.members.send(do=name, **arguments)
        answer = self.members.receive(COMMAND_DEADLINE_S)
        return answer, process_s(self.server.process.pid) - before_s


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Measure the chosen numbers of groups; ``torchft_python`` may be None without torchft."""
    loads: list[Load] = []
    quiet: dict[str, Any] | None = None
    if "torchft_plus" in options.systems:
        for groups in options.groups:
            loads.append(_measure_load("torchft_plus", groups, options, None))
        quiet = _measure_steps(Path(options.scratch))
    if torchft_python is not None:
        for groups in TORCHFT_GROUPS:
            if groups <= max(options.groups):
                loads.append(_measure_load("torchft", groups, options, torchft_python))
    return {"loads": [asdict(load) for load in loads], "steps": quiet, "rest_s": options.rest}


def _measure_load(system: str, groups: int, options: Any, python: str | None) -> Load:
    _say(f"{system}, {groups} groups")
    load = Load(system, groups)
    folder = Path(options.scratch) / f"{system}-{groups}"
    folder.mkdir(parents=True)
    with _pair(folder, groups, options.seed, python) as pair:
        others = OtherLoad([pair.server.process.pid, pair.members.process.pid])
        answer, load.connect_cpu_s = pair.do("connect")
        load.connect_ms = answer["ms"]
        answer, cpu_s = pair.do("rest", seconds=options.rest)
        load.rest_share, load.rest_client_share = cpu_s / options.rest, answer["cpu_s"] / options.rest
        _measure_rounds(pair, load, _repetitions(options.rounds, groups))
        losses = _repetitions(options.losses, groups) if python is None else TORCHFT_LOSSES
        for _ in range(losses):
            if python is None:
                answer, _ = pair.do("loss", reported=True)
                load.reported_ms.append(answer["ms"])
                load.join_ms.append(answer["join_ms"])
            answer, _ = pair.do("loss", reported=False)
            load.broken_ms.append(answer["ms"])
        load.other_load_cores = others.cores()
    return load


def _measure_rounds(pair: Pair, load: Load, rounds: int) -> None:
    for _ in range(rounds):
        answer, cpu_s = pair.do("round")
        load.round_ms.append(answer["ms"])
        load.round_cpu_s += cpu_s / rounds
        load.round_client_cpu_s += answer["cpu_s"] / rounds


def _repetitions(wanted: int, groups: int) -> int:
    """As many as wanted up to 128 groups, fewer above, where each takes longer."""
    return max(5, min(wanted, wanted * 128 // groups))


@contextmanager
def _pair(folder: Path, groups: int, seed: int, python: str | None) -> Generator[Pair]:
    least = max(1, groups // 2)
    with ExitStack() as stack:
        if python is None:
            server, address = lighthouses.start_torchft_plus(folder, least, expected_replicas=groups)
            command = [sys.executable, "-m", "benchmarks.light_members"]
            env = environment([ROOT, ROOT / "scripts"])
        else:
            server, address = lighthouses.start_torchft(python, folder, "lighthouse", least)
            command = [python, "-m", "benchmarks.torchft_members"]
            env = environment([ROOT / "scripts"], RUST_LOG="error")
        stack.callback(server.end)
        members = Worker("the members", command, env, folder / "members.log")
        stack.callback(members.end)
        members.send(address=address, count=groups, seed=seed)
        yield Pair(server, members)


def _measure_steps(folder: Path) -> dict[str, Any]:
    """Two real Managers train; what do they say to the Lighthouse meanwhile?"""
    _say(f"{STEPS} steps of two Managers")
    with ExitStack() as stack:
        server, address = lighthouses.start_torchft_plus(folder, 2, expected_replicas=2)
        stack.callback(server.end)
        tap = LighthouseTap(address)
        stack.callback(tap.close)
        workers: list[Worker] = []
        for rank in (0, 1):
            command = [sys.executable, "-m", "benchmarks.overhead_worker"]
            env = environment([ROOT, ROOT / "scripts"])
            workers.append(Worker(f"trainer {rank}", command, env, folder / f"trainer-{rank}.log"))
            stack.callback(workers[-1].end)
        port = 0
        for rank, worker in enumerate(workers):
            lighthouse = {"torchft_plus": tap.address}
            worker.send(rank=rank, store_port=port, workload="model16", lighthouses=lighthouse)
            port = port or worker.receive(COMMAND_DEADLINE_S)["store_port"]
        for worker in workers:
            worker.receive(COMMAND_DEADLINE_S)
        _run_steps(workers, 4)
        before = tap.counts()
        wall_ms = _run_steps(workers, STEPS)
        up, down = (dict(after - was) for after, was in zip(tap.counts(), before, strict=True))
    return {"steps": STEPS, "wall_s": wall_ms * STEPS / 1000, "up": up, "down": down}


def _run_steps(workers: list[Worker], steps: int) -> float:
    for worker in workers:
        worker.send(mode="torchft_plus", steps=steps)
    return max(worker.receive(COMMAND_DEADLINE_S)["wall_ms"] for worker in workers)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    loads = result["loads"]
    rest = ["Lighthouse", "groups", "connect all, s", "CPU s", "at rest, % of a core", "client, %"]
    rounds = ["Lighthouse", "groups", "round ms, median", "p99", "rounds", "server CPU ms", "client CPU ms"]
    losses = [
        "Lighthouse",
        "groups",
        "exit reported: ms, median",
        "p99",
        "stream broken only: ms, median",
        "p99",
    ]
    losses += ["losses of each", "join ms, median"]
    load = max((one["other_load_cores"] for one in loads), default=0.0)
    out = [
        (f"At rest; others used up to {load:.2f} cores", rest, [_rest(x) for x in loads]),
        ("A full round: all ask at once, until everybody has the quorum", rounds, [_round(x) for x in loads]),
        ("From a member's death until all others have the next quorum", losses, [_loss(x) for x in loads]),
    ]
    steps = result["steps"]
    if steps is not None:
        title = f"What two Managers and the Lighthouse said during {steps['steps']} steps ({steps['wall_s']:.1f} s)"
        lines = [[way, _counts(steps[way])] for way in ("up", "down")]
        out.append((title, ["way", "messages"], lines))
    return out


def _rest(load: dict[str, Any]) -> list[str]:
    cells = [load["system"], str(load["groups"]), f"{load['connect_ms'] / 1000:.2f}"]
    cells += [f"{load['connect_cpu_s']:.2f}"]
    return cells + [f"{100 * load[key]:.1f}" for key in ("rest_share", "rest_client_share")]


def _round(load: dict[str, Any]) -> list[str]:
    cells = [load["system"], str(load["groups"]), *_median_p99(load["round_ms"]), str(len(load["round_ms"]))]
    return cells + [f"{1000 * load[key]:.1f}" for key in ("round_cpu_s", "round_client_cpu_s")]


def _loss(load: dict[str, Any]) -> list[str]:
    cells = [load["system"], str(load["groups"])]
    cells += [*_median_p99(load["reported_ms"]), *_median_p99(load["broken_ms"]), str(len(load["broken_ms"]))]
    return [*cells, _median_p99(load["join_ms"])[0]]


def _median_p99(values: list[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return f"{quantile(values, 0.5):.1f}", f"{quantile(values, 0.99):.1f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "nothing"


def failures(result: dict[str, Any]) -> list[str]:
    """A running quorum that says more than heartbeats to the Lighthouse."""
    steps = result["steps"]
    said = set() if steps is None else {*steps["up"], *steps["down"]} - {"beat"}
    return [f"a running quorum exchanged more than heartbeats: {', '.join(sorted(said))}"] if said else []


NOTES = [
    f"at rest: every member sends a heartbeat each {Timeouts().heartbeat_interval_ms} ms (torchft's: 100 ms), the defaults; ours"
    " carry a new step, phase and counter each.",
    "our members: one process, one connection each, HTTP/2 by hand; of what comes down only the first copy of a quorum is parsed.",
    "torchft's members: its LighthouseClient, two connections and threads each; its round includes what this Python client costs"
    " (client CPU), its server's CPU does not.",
    "loss, exit reported: the stream breaks and a launcher's report follows at once; stream broken only: reconnect_grace (100 ms)"
    " is part of it. torchft: heartbeats end; it has nothing else to notice by.",
    "join: from the connection of the replacement until everybody has the quorum with it, everyone asking at once.",
    "p99 of fewer than 100 values is near their maximum.",
    "server and members share the machine's cores; a round and a loss of thousands of groups measure both.",
]
