"""A seeded simulation of the whole protocol: real cores, fake time, network and hosts.

    python -m torchft_plus.testing --seeds 1000        # many schedules of failures
    python -m torchft_plus.testing --seed 17 --trace   # one again, event by event

What is real: the Lighthouse's quorum core and running clock, the step core and control words of every group. What is
modelled after the shells: streams, sessions and heartbeats, the leaders' mesh, links inside a group, lanes, state servers and
fetches, the training thread of each rank, launchers, stores. ``Oracle`` checks the promises after every event.
"""
