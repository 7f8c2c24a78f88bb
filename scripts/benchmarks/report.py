"""Prints tables, and writes a result as JSON and Markdown."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Table = tuple[str, list[str], list[list[str]]]


def print_tables(tables: list[Table]) -> None:
    """Plain text, columns aligned."""
    for title, header, rows in tables:
        widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
        print(f"\n{title}")
        for line in [header, ["-" * width for width in widths], *rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def write(
    folder: Path,
    name: str,
    about: dict[str, Any],
    result: dict[str, Any],
    tables: list[Table],
    notes: list[str],
) -> list[Path]:
    """Write ``name``.json (everything) and ``name``.md (the tables and notes) into ``folder``. Returns the paths.

    ``about`` is what it was measured with, as ``about.About`` tells it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps({"about": about, "notes": notes, **result}, indent=1) + "\n", encoding="utf-8")
    text.write_text(_markdown(name, about, tables, notes), encoding="utf-8")
    failure_file(folder, name).unlink(missing_ok=True)
    return [data, text]


def write_failure(folder: Path, name: str, command: str, reason: str) -> None:
    """Write down that a run gave no figures; the next one that does takes it away."""
    failure = {"time": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "command": command, "reason": reason}
    failure_file(folder, name).write_text(json.dumps(failure, indent=1) + "\n", encoding="utf-8")


def failure_file(folder: Path, name: str) -> Path:
    """Where ``write_failure`` writes."""
    return folder / f"{name}.failed.json"


def _markdown(name: str, about: dict[str, Any], tables: list[Table], notes: list[str]) -> str:
    lines = [f"# bench {name}", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    for title, header, rows in tables:
        lines += [f"## {title}", "", *markdown_table(header, rows), ""]
    return "\n".join(lines + [f"- {note}" for note in notes]) + "\n"


def markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table; a bar within a cell is escaped."""
    return [_row(header), _row(["---"] * len(header)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
