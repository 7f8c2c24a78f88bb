"""torchft's module of this name. What it exports there is in our event log (``TORCHFT_PLUS_EVENTS``)."""

from __future__ import annotations


def setup_logger(name: str) -> None:
    """Accepted for torchft's sake: there is nothing to set up.

    Args:
        name: of the logger.
    """
    del name


def shutdown() -> None:
    """As ``setup_logger``."""
