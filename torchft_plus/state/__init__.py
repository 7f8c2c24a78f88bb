"""State of a replica: what it consists of, how peers give it, how a joiner becomes level without anybody
waiting."""

from torchft_plus.state.catch_up import CatchUp
from torchft_plus.state.errors import StateError
from torchft_plus.state.fetch import FetchReport, fetch_state
from torchft_plus.state.manifest import Manifest
from torchft_plus.state.registry import StateRegistry, describe_mismatch
from torchft_plus.state.server import StateServer

__all__ = [
    "CatchUp",
    "FetchReport",
    "Manifest",
    "StateError",
    "StateRegistry",
    "StateServer",
    "describe_mismatch",
    "fetch_state",
]
