"""Makes ``benchmarks.md`` and its plots from the JSON files of the benches, whenever each was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from benchmarks import convergence, page_plots, plots, report, summary
from benchmarks.benches import BENCHES

PAGE, PICTURES = "benchmarks.md", "benchmarks"
TEMPLATE = Path(__file__).with_name("page_template.md")
DRAWINGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "recovery": page_plots.gaps,
    "goodput": page_plots.tokens,
    "state": page_plots.transfers,
    "lighthouse": page_plots.rounds,
    "convergence": convergence.draw,
}
_MISFIT = (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError)
"""What comes of figures that another version of a bench has written, or of none."""
_PLACE = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+([\w.+-]*)")


def write(folder: Path, docs: Path) -> list[str]:
    """Make the page in ``docs`` of what is in ``folder``. Returns what went wrong, one sentence each."""
    results, failed = _load(folder)
    if not results:
        return [*failed, f"{folder} has no figures of any bench"]
    pictures = docs / PICTURES
    docs.mkdir(parents=True, exist_ok=True)
    sections: list[str] = []
    for name in BENCHES:
        lines, misfit = _section(name, results.get(name), _failure(folder, name), pictures)
        sections += lines
        if misfit:
            failed.append(misfit)
            results.pop(name)
    _, header, rows = summary.table(results)
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    text = template.substitute(
        summary="\n".join(report.markdown_table(header, rows)), sections="\n".join(sections).rstrip()
    )
    (docs / PAGE).write_text(text, encoding="utf-8")
    print(docs / PAGE)
    return failed


def _load(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What each bench has written, by its name; and which files are none of theirs."""
    results: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for name in BENCHES:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        try:
            results[name] = {"about": {}, "notes": [], **json.loads(path.read_text(encoding="utf-8"))}
        except (ValueError, TypeError) as error:
            failed.append(f"{path.name} cannot be read: {error}")
    return results, failed


def _failure(folder: Path, name: str) -> dict[str, str]:
    path = report.failure_file(folder, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _section(
    name: str, result: dict[str, Any] | None, failure: Mapping[str, str], pictures: Path
) -> tuple[list[str], str]:
    """Lines of a bench's section, and why its figures could not be shown."""
    bench = BENCHES[name]
    picture = pictures / f"{name}.png"
    picture.unlink(missing_ok=True)  # one of older figures would be believed
    lines = [f"## {name}", "", _purpose(bench), ""]
    misfit = ""
    if result is not None:
        try:
            if name in summary.LINES:
                summary.LINES[name](result)  # the table at the top must be able to read it, too
            lines += _measured(bench, result, _draw(name, result, picture))
        except _MISFIT as error:
            picture.unlink(missing_ok=True)
            misfit = f"the figures of {name} are not what this version of it writes: {error!r}"
            lines += [f"{summary.NOT_MEASURED}: {misfit}", ""]
    elif not failure:
        lines += [summary.NOT_MEASURED, ""]
    if failure:
        said = f"**A run of {failure['time']} gave no figures** (`{failure['command']}`): {without_places(failure['reason'])}"
        lines += [said, ""]
    return lines, misfit


def _measured(bench: Any, result: dict[str, Any], picture: str) -> list[str]:
    lines = _origin(result["about"])
    lines += [f"**Failed:** {without_places(failure)}\n" for failure in bench.failures(result)]
    lines += [f"![{picture}]({PICTURES}/{picture})", ""] if picture else []
    for title, header, rows in bench.tables(result):
        shown = [[without_places(cell) for cell in row] for row in rows]
        lines += [f"**{title}**", "", *report.markdown_table(header, shown), ""]
    return [*lines, *(f"- {note}" for note in result["notes"]), ""]


def _draw(name: str, result: dict[str, Any], path: Path) -> str:
    """Name of the picture, or nothing where there is none to make."""
    draw = DRAWINGS.get(name)
    if draw is None or not _drawable(name, result) or not plots.available():
        return ""
    plots.save(draw(result), path)
    return path.name


def _drawable(name: str, result: dict[str, Any]) -> bool:
    """Parts of a bench can be left out when it is run."""
    if name == "goodput":
        return bool(result["goodput"]["rows"])
    needed = {"state": "transfer", "recovery": "variants", "lighthouse": "loads"}
    return name not in needed or bool(result.get(needed[name]))


def _purpose(bench: Any) -> str:
    """First sentence of the bench's own text."""
    first = (bench.__doc__ or "").strip().splitlines()[0]
    sentence = first.partition(": ")[2]
    return sentence[:1].upper() + sentence[1:]


def _origin(about: Mapping[str, Any]) -> list[str]:
    """Command, time, machine and versions, as far as they are known."""
    names = {
        "time": "measured {}",
        "seconds": "in {} s",
        "cpu": "{}",
        "cores": "{} cores",
        "memory_gib": "{} GiB",
        "kernel": "Linux {}",
        "python": "Python {}",
        "torch": "torch {}",
        "torchft": "torchft {}",
        "commit": "commit {}",
        "others_used_cores": "others used {} cores meanwhile",
        "seed": "seed {}",
    }
    said = ", ".join(form.format(about[key]) for key, form in names.items() if key in about)
    command = [f"    {about['command']}", ""] if "command" in about else []
    return [*command, f"*{said[:1].upper()}{said[1:]}.*" if said else "*Nobody knows when.*", ""]


def without_places(text: str) -> str:
    """The text with paths of the machine cut down to their last names."""
    return _PLACE.sub(r"\1", text)
