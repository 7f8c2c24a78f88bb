"""TorchTitan's own fault-tolerant trainer, unmodified, under the alias.

``experiments.torchft`` of 0.3.0 or ``experiments.ft`` of 0.2.2. The process is made ready for CPUs as ours is, and that is all.
``STOCK_FOLDER``: assets; ``STOCK_REPLICA``, ``STOCK_STEPS``; ``STOCK_RESULT``: where the outcome goes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from titan_process import digest

from torchft_plus.compat.alias import install
from torchft_plus.titan import cpu, versions

FOLDER = Path(os.environ["STOCK_FOLDER"])
REPLICA, STEPS = int(os.environ["STOCK_REPLICA"]), int(os.environ["STOCK_STEPS"])


def write_result(trainer: Any) -> None:
    manager = trainer.ft_manager.manager
    result = {
        "parameters": digest(trainer.model_parts),
        "step": manager.current_step(),
        "rates": [group["lr"] for one in trainer.optimizers for group in one.param_groups],
    }
    Path(os.environ["STOCK_RESULT"]).write_text(json.dumps(result))
    manager.shutdown()


def config_v03() -> Any:
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
    from torchtitan.experiments.torchft.config.job_config import FaultTolerance
    from torchtitan.experiments.torchft.llama3 import model_registry
    from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.tools.profiler import Profiler

    config = llama3_torchft_debugmodel()
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec = spec
    config.hf_assets_path = str(FOLDER / "tokenizer")
    config.dump_folder = str(FOLDER / f"dump{REPLICA}")
    config.profiler = Profiler.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, 32, STEPS
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.dataloader.dataset, config.dataloader.dataset_path = "c4_test", str(FOLDER / "text")
    config.activation_checkpoint = None
    config.validator.enable = False
    config.comm.trace_buf_size = 0
    config.debug.seed = 42
    config.checkpoint = TorchFTCheckpointManager.Config(
        enable=True,  # without it 0.3.0 hands nothing over: a group that comes back would count its steps from 0
        interval=10_000,
        enable_ft_dataloader_checkpoints=False,
    )
    config.fault_tolerance = FaultTolerance(
        enable=True, process_group="gloo", replica_id=REPLICA, group_size=2, min_replica_size=1
    )
    return config


TOML = """
[job]
dump_folder = "{folder}/dump{replica}"
[metrics]
log_freq = 1
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
[optimizer]
lr = 8e-4
[lr_scheduler]
warmup_steps = 2
[training]
dataset = "c4_test"
dataset_path = "{folder}/text"
local_batch_size = 1
seq_len = 32
steps = {steps}
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[comm]
trace_buf_size = 0
[debug]
seed = 42
[checkpoint]
enable = false
[fault_tolerance]
enable = true
process_group = "gloo"
replica_id = {replica}
group_size = 2
min_replica_size = 1
"""


def run_v02() -> None:
    from torchtitan.experiments.ft.train import FTTrainer
    from torchtitan.train import main

    watch(FTTrainer)
    main(FTTrainer)


def run_v03() -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
    from torchtitan.train import main

    watch(FaultTolerantTrainer)
    setattr(ConfigManager, "parse_args", lambda *_: config_v03())  # noqa: B010 - in place of --module and --config
    main()


def watch(trainer: Any) -> None:
    close = trainer.close

    def write_and_close(self: Any) -> None:
        write_result(self)
        close(self)

    trainer.close = write_and_close


if __name__ == "__main__":
    version = versions.check(versions.installed("torchtitan"), versions.installed("torch"))
    install()
    file = FOLDER / f"stock{REPLICA}.toml"
    file.write_text(TOML.format(folder=FOLDER, replica=REPLICA, steps=STEPS))
    sys.argv = ["train", "--job.config_file", str(file)]  # 0.2.2 reads it when it is imported
    cpu.prepare(version)
    if version == (0, 2):
        run_v02()
    else:
        run_v03()
