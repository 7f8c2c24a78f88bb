"""The summary of a run in words. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torchft_plus.launch.summary import TOTAL_LOSS, DigestVerdict, ExitCode, Summary
from torchft_plus.launch.timeline import Failure

_IN_FULL = 8
"""With more failures than this, each gets one line instead of its time line."""
_COMMITS = {"step": "commits", "sync": "syncs"}
_NORMAL = {"step": "a normal step takes", "sync": "a normal window takes"}


def summary_lines(summary: Summary) -> list[str]:
    """What the launcher prints at the end, line by line."""
    of = f" of {summary.steps_wanted}" if summary.steps_wanted is not None else ""
    loss = f", loss {summary.loss:.4f}" if summary.loss is not None else ""
    state = "finished" if summary.finished else f"NOT FINISHED ({summary.reason})"
    unit = _unit(summary)
    inner = f" ({summary.steps * summary.steps_per_commit} inner steps)" if unit == "sync" else ""
    lines = [f"Run {state}: {summary.steps}{of} {unit}s committed{inner}{loss}, {summary.seconds:.1f} s."]
    lines += [f"TOTAL LOSS: {text.removeprefix(f'{TOTAL_LOSS}: ')}." for text in summary.total_losses]
    if len(summary.failures) <= _IN_FULL:
        for number, failure in enumerate(summary.failures, 1):
            lines += _failure_lines(number, failure, unit)
    else:
        lines += _failure_table(summary.failures, unit)
    lost = len(summary.lost_steps) * summary.steps_per_commit
    lines.append(f"{'Inner steps' if unit == 'sync' else 'Steps'} lost by survivors: {lost}.")
    lines += [f"  {replica_id}, {unit} {step}: {reason}" for replica_id, step, reason in summary.lost_steps]
    if summary.forked_steps:
        steps = ", ".join(map(str, summary.forked_steps[:10]))
        lines.append(f"TWO LINEAGES: committed under more than one quorum: steps {steps}.")
    lines.append(_digest_line(summary.digests, unit))
    lines.append(_verdict_line(summary.exit_code))
    return lines


def _unit(summary: Summary) -> str:
    return "sync" if summary.steps_per_commit > 1 else "step"


def _failure_lines(number: int, failure: Failure, unit: str) -> list[str]:
    by = ", injected" if failure.injected else ""
    lines = [f"Failure {number}: {failure.what} after {unit} {failure.step}{by}."]
    for moment in sorted(failure.moments, key=lambda m: m.after_s):
        note = f"  ({moment.note})" if moment.note else ""
        lines.append(f"  +{moment.after_s:8.3f} s  {moment.name}{note}")
    if failure.gap_s is not None:
        normal = (
            f"; {_NORMAL[unit]} {failure.normal_step_s:.3f} s" if failure.normal_step_s is not None else ""
        )
        lines.append(f"  survivors' longest gap between {_COMMITS[unit]}: {failure.gap_s:.3f} s{normal}")
    if not failure.healed:
        end = "it failed again" if failure.failed_again else "the run ended"
        lines.append(f"  it had not contributed again when {end}")
    return lines


def _failure_table(failures: Sequence[Failure], unit: str) -> list[str]:
    """One line a failure, times in seconds after it; summary.json has all of it."""
    lines = [f"{len(failures)} failures (seconds):", "  detected  gap    healed  what"]
    for failure in failures:
        detected, healed = failure.after("detected"), failure.after("joiner's first commit")
        cells = [_cell(detected), _cell(failure.gap_s), _cell(healed)]
        lines.append(
            f"  {cells[0]:8}  {cells[1]:5}  {cells[2]:6}  {failure.what} after {unit} {failure.step}"
        )
    gaps = [failure.gap_s for failure in failures if failure.gap_s is not None]
    normal = [failure.normal_step_s for failure in failures if failure.normal_step_s is not None]
    if gaps and normal:
        lines.append(
            f"  survivors' gap between {_COMMITS[unit]}: median {statistics.median(gaps):.3f} s, longest {max(gaps):.3f} s;"
            f" {_NORMAL[unit]} {statistics.median(normal):.3f} s"
        )
    return lines


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _digest_line(digests: DigestVerdict, unit: str) -> str:
    if digests.unequal:
        return (
            f"REPLICAS DIFFER: {digests.unequal} of {digests.compared} digests are unequal,"
            f" first at {unit} {digests.first_unequal_step}."
        )
    if digests.compared:
        return f"Digests: {digests.compared} compared, all equal."
    if digests.expected:
        return "NO DIGESTS COMPARED although fault_tolerance.digest_every asks for them: nothing is proved."
    return "Digests: not asked for (fault_tolerance.digest_every)."


def _verdict_line(exit_code: int) -> str:
    verdicts = {
        ExitCode.GOOD: "all promises kept",
        ExitCode.NOT_FINISHED: "the run did not finish",
        ExitCode.REFUSED: "the trainer found its configuration wrong",
        ExitCode.REPLICAS_DIFFER: "the replicas are not proved equal",
        ExitCode.STEPS_LOST: "steps were lost",
    }
    known = {int(code): text for code, text in verdicts.items()}
    return f"Exit status {exit_code}: {known.get(exit_code, 'ended by a signal')}."
