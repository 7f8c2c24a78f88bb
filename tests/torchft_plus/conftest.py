"""Puts this folder on ``sys.path``, so that test files of all rooms can import ``rank_processes``."""
