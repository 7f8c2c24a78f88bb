"""Coordination of replica groups: the Lighthouse, its client and its words. Imports no torch."""

import os

# Read when grpc is imported. Processes forked by a trainer (data loaders) never use its channels; without this grpc
# tries to stop its threads around every fork, and complains when it cannot.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
