"""torchft's ``LighthouseService``, answered from the same quorum core: a job of its own for torchft 0.2.0 managers.

``words`` are plain values, ``core`` is the pure adapter, ``wire`` converts from and to protobuf, ``service`` is the shell.
"""
