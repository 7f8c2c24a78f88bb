"""torchft's own tests on torchft_plus."""
