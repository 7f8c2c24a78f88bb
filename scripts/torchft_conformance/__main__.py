"""Runs torchft's own tests on torchft_plus and prints a table: passed, failed, not applicable, with reasons.

Nothing of the checkout is copied or changed; each file runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from torchft_conformance.crutches import CRUTCHES
from torchft_conformance.not_applicable import FILES

_MARK = "not applicable: "
FILE_TIMEOUT_S = 1_500
_NEEDED = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "parameterized": "parameterized"}
_ADDED = "Given to the tests beyond torchft's public API:\n" + "\n".join(
    f"- {one.replace('`', '')}" for one in CRUTCHES
)


@dataclass
class Outcome:
    """What became of one file's tests."""

    file: str
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict[str, str])
    not_applicable: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


def run_file(checkout: Path, file: str, folder: Path, timeout_s: int) -> Outcome:
    """Run the tests of ``file`` (its path in the package)."""
    outcome = Outcome(file)
    module = "torchft." + file.removesuffix(".py").replace("/", ".")
    entry, report = folder / f"test_{module.replace('.', '_')}.py", folder / f"{module}.xml"
    entry.write_text(f"from {module} import *\n")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "torchft_conformance.plugin", "-p", "no:cacheprovider", "-c", os.devnull,
        "--rootdir", str(folder), f"--timeout={timeout_s}", f"--junitxml={report}", str(entry),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "TORCHFT_CHECKOUT": str(checkout),
        "TORCHFT_FILE": file,
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=FILE_TIMEOUT_S, cwd=folder
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output = f"the file did not end within {error.timeout} s"
    outcome.seconds = time.monotonic() - started
    (folder / f"{module}.log").write_text(output)
    if not report.exists():
        outcome.failed["(the whole file)"] = (
            output.strip().splitlines()[-1][:300] if output.strip() else "no output"
        )
        return outcome
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [*case.findall("failure"), *case.findall("error")]
        skipped = case.find("skipped")
        if bad:
            outcome.failed[name] = (bad[0].get("message") or "").strip().splitlines()[0][:300]
        elif skipped is not None:
            outcome.not_applicable[name] = (skipped.get("message") or "").removeprefix(_MARK)
        else:
            outcome.passed += 1
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """Markdown: one line per file, then reasons."""
    lines = ["| file | passed | failed | not applicable |", "| --- | --- | --- | --- |"]
    for one in outcomes:
        whole = FILES.get(one.file)
        last = whole or str(len(one.not_applicable))
        lines.append(f"| {one.file} | {one.passed} | {len(one.failed)} | {last} |")
    passed, failed = sum(one.passed for one in outcomes), sum(len(one.failed) for one in outcomes)
    lines.append(f"| **all** | **{passed}** | **{failed}** | |")
    reasons: Counter[str] = Counter()
    for one in outcomes:
        for name, reason in one.not_applicable.items():
            key = reason if "GPU" in reason or "CUDA" in reason else f"{one.file} {name}: {reason}"
            reasons[key] += 1
    if reasons:
        lines += ["", "Not applicable:", ""]
        lines += [f"- {count} x {reason}" for reason, count in sorted(reasons.items())]
    failures = [f"- {one.file} {name}: {why}" for one in outcomes for name, why in one.failed.items()]
    return "\n".join(lines + (["", "Failed:", "", *failures] if failures else []))


def main() -> int:
    """Exit status 1 if a test failed."""
    parser = argparse.ArgumentParser(
        "scripts/conformance",
        description=__doc__,
        epilog=_ADDED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/meta-pytorch/torchft")
    parser.add_argument(
        "--file", action="append", help="only this file, for example lighthouse_test.py; repeatable"
    )
    parser.add_argument("--timeout_s", type=int, default=120, help="of one test (default 120)")
    parser.add_argument("--logs", type=Path, help="keep pytest's output in this folder")
    options = parser.parse_args()
    package = options.checkout / "torchft"
    if not (package / "manager_integ_test.py").exists():
        parser.error(
            f"{options.checkout} is no checkout of torchft: {package}/manager_integ_test.py is missing"
        )
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        parser.error(
            f"{sys.executable} lacks {', '.join(missing)}, which torchft's tests need: install them there"
        )
    unknown = [file for file in options.file or [] if not (package / file).is_file()]
    if unknown:
        parser.error(f"there is no {unknown[0]} in {package}")
    files = options.file or sorted(str(path.relative_to(package)) for path in package.rglob("*_test.py"))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file in FILES and not options.file:
                outcomes.append(Outcome(file))
                continue
            outcome = run_file(options.checkout.resolve(), file, folder.resolve(), options.timeout_s)
            outcomes.append(outcome)
            print(
                f"{file}: {outcome.passed} passed, {len(outcome.failed)} failed, "
                f"{len(outcome.not_applicable)} not applicable, {outcome.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print(table(outcomes))
    return 1 if any(one.failed for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
