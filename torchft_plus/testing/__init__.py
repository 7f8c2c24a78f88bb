"""A seeded simulation of the whole protocol: real cores, fake time, network and hosts.

python -m torchft_plus.testing --seeds 1000        # many schedules of failures
python -m torchft_plus.testing --seed 17 --trace   # one again, event by event
"""
