"""Runs a script or module that imports torchft, unmodified, on torchft_plus.

python -m torchft_plus.compat script.py [arguments]
torchrun ... -m torchft_plus.compat script.py [arguments]
python -m torchft_plus.compat -m package.module [arguments]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torchft_plus.compat.alias import install
from torchft_plus.compat.spawned import follow


def main() -> int:
    """Take the place of ``python``; returns the exit status for a wrong command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    install()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            print("-m needs the name of a module", file=sys.stderr)
            return 2
        sys.argv = arguments[1:]
        follow(module=arguments[1])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    script = Path(arguments[0])
    if not script.exists():
        print(f"there is no script {arguments[0]!r}", file=sys.stderr)
        return 2
    sys.argv = arguments
    sys.path.insert(0, str(script.resolve().parent))
    follow(path=str(script.resolve()))
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
