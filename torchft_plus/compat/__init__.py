"""Runs scripts that were written for torchft: see ``torchft_plus.compat.alias`` and docs/from-torchft.md."""
