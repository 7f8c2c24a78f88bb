"""Import it first, and ``import torchft`` finds torchft_plus: ``import torchft_plus.compat.install``."""

from torchft_plus.compat.alias import install

install()
