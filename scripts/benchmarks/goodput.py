"""``bench goodput``: tokens committed per second while a group is killed every 20 s, and what single faults cost.

Each row is one job of three groups on this machine: first undisturbed, then with kills, by the same schedule for all rows.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import goodput_scenarios
from benchmarks.children import ChildFailed
from benchmarks.goodput_account import Part, Strike, corrected, schedule
from benchmarks.goodput_jobs import CHECKPOINT_EVERY, Job, SupervisedGroups, TorchrunRanks
from benchmarks.groups import GROUPS, VARIANTS
from benchmarks.machine import busy_s, own_s
from benchmarks.workload import Workload

WORKLOAD = Workload(
    widths=(512, 1024, 1024, 1024, 512), batch=32, adam=True, device_time_s=0.12, digest_every=10
)
TARGET = 0.9
"""Of ours, corrected for the groups that were absent."""
ROWS = {
    "torchft_plus": "plus",
    "torchft default": "torchft",
    "torchft tuned": "torchft-tuned",
    "torchft tuned, allreduce": "torchft-tuned-allreduce",
    "checkpoint-restart": "",
}
"""Name of a row: its variant; empty: plain DDP under torchrun."""
SETTLED_STEPS = 10
START_DEADLINE_S, COMPARE_DEADLINE_S = 120.0, 60.0
POLL_S = 0.05
"""A supervisor looks so often after what it runs."""


def add_options(part: Any) -> None:
    """The options of ``bench goodput``."""
    rows, scenarios = list(ROWS), list(goodput_scenarios.SCENARIOS)
    part.add_argument("--seconds", type=float, default=300.0, help="with kills (default 300)")
    part.add_argument("--kill-every", type=float, default=20.0, help="seconds between kills (default 20)")
    part.add_argument("--undisturbed-seconds", type=float, default=60.0, help="before the kills (default 60)")
    part.add_argument("--rows", nargs="*", choices=rows, default=rows, help="default: all")
    part.add_argument("--scenarios", nargs="*", choices=scenarios, default=scenarios, help="default: all")
    part.add_argument(
        "--quick", action="store_true", help="20 s with a kill every 8, after 5 s; of scenarios 10 s"
    )


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Run the rows, then the scenarios. Returns what the report needs."""
    if options.quick:
        options.seconds, options.kill_every, options.undisturbed_seconds = 20.0, 8.0, 5.0
    rows: list[dict[str, Any]] = []
    for name in options.rows:
        variant = VARIANTS.get(ROWS[name])
        if variant is not None and variant.system not in options.systems:
            continue
        folder = Path(options.scratch) / name.replace(", ", "-").replace(" ", "-")
        job = (
            TorchrunRanks(folder, WORKLOAD)
            if variant is None
            else SupervisedGroups(variant, folder, torchft_python, WORKLOAD)
        )
        rows.append(_Row(name, job, options).run())
        print("  ".join(_cells(rows[-1], rows)), file=sys.stderr, flush=True)
    scenarios = goodput_scenarios.measure(options, torchft_python, WORKLOAD)
    settings = {
        "seconds": options.seconds,
        "kill_every_s": options.kill_every,
        "undisturbed_seconds": options.undisturbed_seconds,
        "seed": options.seed,
        "state_bytes": WORKLOAD.state_bytes,
        "tokens_per_batch": WORKLOAD.batch,
        "groups": GROUPS,
    }
    return {"settings": settings, "goodput": {"rows": rows}, "scenarios": scenarios}


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU seconds per second."""

    own: float
    others: float


class _Row:
    """One job, undisturbed and disturbed."""

    def __init__(self, name: str, job: Job, options: Any) -> None:
        self._name, self._job, self._options = name, job, options
        self._skipped = 0

    def run(self) -> dict[str, Any]:
        """Measure. A job that cannot go on is a row that says so."""
        options = self._options
        with self._job as job:
            try:
                self._settle()
                undisturbed, load_before = self._play(options.undisturbed_seconds, [])
                strikes = schedule(job.names, options.seconds, options.kill_every, options.seed)
                disturbed, load = self._play(options.seconds, strikes)
                self._compare(disturbed.end)
            except ChildFailed as error:
                return {"name": self._name, "ended_early": str(error)}
            row = self._account(undisturbed, disturbed)
        loads = {"own_cores": [load_before.own, load.own], "others_cores": [load_before.others, load.others]}
        return {"name": self._name, **row, **loads, "ended_early": ""}

    def _settle(self) -> None:
        """Until all train together.

        Raises:
            ChildFailed: they do not.
        """
        end = time.monotonic() + START_DEADLINE_S
        while True:
            self._job.tend()
            full = [step for step in self._job.steps() if step.participants == GROUPS]
            if len(full) >= SETTLED_STEPS and all(map(self._job.level, self._job.names)):
                return
            if time.monotonic() > end:
                raise ChildFailed(f"{self._name} does not train with all groups after {START_DEADLINE_S:g} s")
            time.sleep(POLL_S)

    def _play(self, seconds: float, strikes: list[Strike]) -> tuple[Part, Cores]:
        """Let it train. Returns the part, and what was used of the machine meanwhile."""
        start = time.monotonic()
        own, busy = own_s(self._job.pids()), busy_s()
        left = list(strikes)
        while (now := time.monotonic()) < start + seconds:
            if left and now >= start + left[0].at_s:
                self._strike(left.pop(0))
            self._job.tend()
            time.sleep(POLL_S)
        part = Part(start, time.monotonic())
        own, busy = own_s(self._job.pids()) - own, busy_s() - busy
        return part, Cores(own / part.seconds, max(0.0, busy - own) / part.seconds)

    def _strike(self, strike: Strike) -> None:
        level = [name for name in strike.order if self._job.level(name)]
        if len(level) > 1:
            self._job.kill(level[0])
        else:
            self._skipped += 1

    def _compare(self, since: float) -> None:
        """Train on until the groups that train can be compared, or for so long."""
        while time.monotonic() < since + COMPARE_DEADLINE_S and not self._job.compared_since(since):
            self._job.tend()
            time.sleep(POLL_S)

    def _account(self, undisturbed: Part, disturbed: Part) -> dict[str, Any]:
        job, size = self._job, WORKLOAD.batch
        steps = job.steps()
        before = undisturbed.batches(steps) * size / undisturbed.seconds
        rate = disturbed.batches(steps) * size / disturbed.seconds
        share = rate / before if before else 0.0
        absent_s = {until: disturbed.absent_s(job.absences, until) for until in ("level", "ready")}
        digests = job.digests()
        return {
            "undisturbed_tokens_per_s": before,
            "tokens_per_s": rate,
            "share_raw": share,
            "share_corrected": corrected(share, absent_s["level"], GROUPS, disturbed.seconds),
            "share_corrected_restart": corrected(share, absent_s["ready"], GROUPS, disturbed.seconds),
            "absent_s": absent_s,
            "absences": [asdict(absence) for absence in job.absences],
            "kills": len(job.absences),
            "kills_skipped": self._skipped,
            "steps_lost": job.batches_lost(),
            "restarts": job.restarts,
            "own_deaths": job.own_deaths,
            "deaths": job.deaths,
            "total_losses": job.total_losses,
            "digests_differ": digests and digests[0],
            "digests_compared": digests and digests[1],
            "timeline": disturbed.timeline(steps, size),
        }


# --- report ------------------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    header = [
        "row",
        "undisturbed tokens/s",
        "tokens/s",
        "of ours",
        "share, raw",
        "share, corrected",
        "corrected, restart only",
        "kills (skipped)",
        "ready s",
        "level s",
        "batches lost",
        "own deaths",
        "all lost",
        "digests that differ",
        "CPU ms a batch",
        "others' cores",
    ]
    rows = result["goodput"]["rows"]
    settings = result["settings"]
    title = (
        f"{settings['groups']} groups, {settings['seconds']:g} s with a kill every {settings['kill_every_s']:g} s,"
        f" state of {settings['state_bytes'] / 1e6:.0f} MB"
    )
    all_tables = [(title, header, [_cells(row, rows) for row in rows])] if rows else []
    if result["scenarios"]:
        all_tables.append(goodput_scenarios.table(result["scenarios"]))
    return all_tables


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    if row["ended_early"]:
        return [row["name"], row["ended_early"], *["-"] * 14]
    ours = next((one for one in rows if one["name"] == "torchft_plus" and not one["ended_early"]), None)
    waits = {
        until: [one[until] - one["killed"] for one in row["absences"] if one[until] is not None]
        for until in ("ready", "level")
    }
    compared = row["digests_compared"]
    return [
        row["name"],
        f"{row['undisturbed_tokens_per_s']:.0f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['tokens_per_s'] / ours['tokens_per_s']:.2f}" if ours and ours["tokens_per_s"] else "-",
        f"{row['share_raw']:.3f}",
        f"{row['share_corrected']:.3f}",
        f"{row['share_corrected_restart']:.3f}",
        f"{row['kills']} ({row['kills_skipped']})",
        *[f"{median(values):.1f}" if values else "-" for values in waits.values()],
        str(row["steps_lost"]),
        str(row["own_deaths"]),
        str(row["total_losses"]),
        f"{row['digests_differ']} of {compared}" if compared is not None else "-",
        _cpu_ms(row),
        " / ".join(f"{cores:.2f}" for cores in row["others_cores"]),
    ]


def _cpu_ms(row: dict[str, Any]) -> str:
    rates = [row["undisturbed_tokens_per_s"], row["tokens_per_s"]]
    return " / ".join(
        f"{1000 * cores * WORKLOAD.batch / rate:.0f}" if rate else "-"
        for cores, rate in zip(row["own_cores"], rates, strict=True)
    )


def failures(result: dict[str, Any]) -> list[str]:
    """What must hold of ours; how fast it was on a machine that others may have used is in the table."""
    found: list[str] = []
    for row in result["goodput"]["rows"]:
        if row["ended_early"]:
            found.append(f"{row['name']}: {row['ended_early']}")
        elif row["name"] == "torchft_plus":
            found += [f"torchft_plus: {death}" for death in row["deaths"]]
            if row["digests_differ"]:
                found.append(f"torchft_plus: parameters differ after {row['digests_differ']} steps")
            if not row["digests_compared"]:
                found.append("torchft_plus: no digests could be compared")
            if row["steps_lost"]:
                found.append(f"torchft_plus: {row['steps_lost']} batches of survivors were lost")
    return found + goodput_scenarios.failures(result["scenarios"])


NOTES = [
    f"three groups of one process, an MLP with AdamW, a state of {WORKLOAD.state_bytes / 1e6:.0f} MB; a batch is"
    f" {WORKLOAD.batch} rows of made-up data, and each row counts as a token. {WORKLOAD.device_time_s * 1000:.0f} ms of each"
    " step are a wait that stands for the accelerator, so that two cores serve three groups and a restart. min_replicas is 1.",
    "tokens: of committed steps only, a step as many batches as gradients are in it. Steps that were refused do not count, nor"
    " do those that were rolled back to a checkpoint until they are done again.",
    "share, raw: tokens/s with kills, of the same job's tokens/s before the first kill.",
    "share, corrected: of what the groups that were there could have committed: undisturbed rate x (1 - absent group-seconds /"
    " all group-seconds). A group is absent from its SIGKILL to its first commit after that; whom the bench did not kill is"
    " never absent, so a system that lets healthy groups end or wait gets nothing for those. Restart only: absent until the new"
    " process has done its imports and built its model; joining, fetching and waiting are then the system's.",
    "the two corrections forgive a slow system its own slow victims; raw tokens/s is the figure to rank by.",
    "batches lost: computed by groups that trained, and counted in no commit; of checkpoint-restart those that were rolled back."
    " The one that a killed or ended process was computing is not in it.",
    "own deaths: processes that ended without being killed by the bench; they are started again at once. torchrun ends and"
    " starts the healthy ranks with every kill: that is its way.",
    "all lost: nobody was left who had the state. torchft then begins from step 0; what it had committed counts all the same, as"
    " though it had been restored from a checkpoint that cost nothing: in favour of torchft.",
    "the killed process is started again at once, by the bench, which reports the exit to our Lighthouse as our launcher does"
    " (torchft knows no such report). In checkpoint-restart torchrun does it (monitor interval 0.1 s).",
    f"checkpoint-restart: torchrun --standalone, three ranks of plain DDP over gloo; a copy of the state each {CHECKPOINT_EVERY}"
    " steps, written by a thread beside training, to a file in the page cache (no fsync): as cheap as it gets here; on a"
    " cluster it is dearer. Its undisturbed rate includes its checkpoints. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, as with the"
    " default of torch 2.13 a restart over gloo finds the addresses of dead ranks in torchrun's store, and hangs.",
    "CPU ms a batch: of the whole job, its Lighthouse and its restarts, undisturbed / with kills. Others' cores: CPU that the job"
    " did not use, likewise; where that is much, tokens/s says little, and the CPU of a batch a little more.",
    "one machine: a restart takes CPU from the survivors in every row (three at a time under torchrun), which a cluster would not"
    " see; no scheduler has to find a new node; gloo, no accelerator. One run a row: no spread.",
]
