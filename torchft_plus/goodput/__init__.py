"""Goodput of a run under a failure rate: this system beside checkpoint-restart and torchft-like policies.

``torchft-plus simulate``; docs/simulation.md says what is real, what is modelled and what is assumed. Imports no torch.
"""
