"""Training that synchronises every N inner steps: LocalSGD, DiLoCo and Streaming DiLoCo."""
