"""Moving a state dict between groups by hand, under torchft's names. A Manager has its own way: ``torchft_plus.state``."""

from torchft_plus.checkpointing.http_transport import HTTPTransport
from torchft_plus.checkpointing.pg_transport import PGTransport
from torchft_plus.checkpointing.transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport"]
