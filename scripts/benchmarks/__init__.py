"""What scripts/bench measures. ``*_worker`` run in the environment that is measured; the rest starts them and reports."""
