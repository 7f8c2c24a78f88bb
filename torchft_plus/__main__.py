"""``python -m torchft_plus``: the same as ``torchft-plus``."""

import sys

from torchft_plus.cli import main

if __name__ == "__main__":
    sys.exit(main())
