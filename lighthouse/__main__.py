"""``python -m lighthouse``."""

import sys

from lighthouse.cli import main

if __name__ == "__main__":
    sys.exit(main())
