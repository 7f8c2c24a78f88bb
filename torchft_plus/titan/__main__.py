"""``torchrun ... -m torchft_plus.titan --job.config_file run.toml [--section.key value]...``"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan import versions
from torchft_plus.titan.adapters import load_adapter
from torchft_plus.titan.config import read


def main(arguments: Sequence[str] | None = None) -> int:
    """Train one rank of one replica group.

    Returns:
        Exit status: 0 when training ended, 2 when the run file, the command line, the environment or an installed
        version is wrong (one sentence on stderr, nothing started).
    """
    try:
        version = versions.check(versions.installed("torchtitan"), versions.installed("torch"))
        config = read(sys.argv[1:] if arguments is None else arguments)
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(variable):
                raise ConfigError(f"{variable} is not set: start this module with torchrun.")
        adapter = load_adapter(version)
        settings = adapter.settings(config)
    except ConfigError as error:
        print(f"torchft_plus.titan: {error}", file=sys.stderr)
        return 2
    adapter.train(config, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
