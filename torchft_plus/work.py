"""torchft's module of this name."""

from torchft_plus.process_group.works import FinishedWork as _DummyWork

__all__ = ["_DummyWork"]
