"""The one error of the state room."""

from __future__ import annotations


class StateError(RuntimeError):
    """State could not be registered, read, sent, fetched or replayed; the message is one sentence for
    people."""
