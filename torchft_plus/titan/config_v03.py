"""The checked run as torchtitan 0.3.x's ``Trainer.Config``: 0.2.2's names mapped to 0.3's components."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import tyro
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan.config import TitanConfig
from torchft_plus.titan.schema import SECTIONS, Tables
from torchft_plus.titan.versions import numbers

Values = Mapping[str, Any]

WITHOUT_EFFECT = {
    ("job", "description"),
    ("job", "custom_config_module"),
    ("checkpoint", "enable_ft_dataloader_checkpoints"),
    ("memory_estimation", "disable_fake_mode"),
    ("activation_checkpoint", "selective_ac_option"),
    ("activation_checkpoint", "early_stop"),
    ("model", "print_after_conversion"),
}
"""Keys that say nothing under 0.3: dropped."""

AS_IN_0_2: dict[tuple[str, str], Any] = {
    ("parallelism", "disable_loss_parallel"): False,
    ("parallelism", "pipeline_parallel_expert_parallel_overlap"): True,
    ("parallelism", "context_parallel_rotate_method"): "allgather",
    ("parallelism", "expert_tensor_parallel_degree"): 1,
    ("parallelism", "expert_parallel_comm_backend"): "standard",
    ("optimizer", "early_step_in_backward"): False,
    ("memory_estimation", "enable"): False,
    ("experimental", "custom_import"): "",
    ("experimental", "custom_args_module"): "",
    ("model", "converters"): [],
}
"""Keys that 0.3 has no place for: only their default of 0.2.2 may be given."""


class Table:
    """Values of one table; what is not taken by ``finish`` has no place in torchtitan 0.3."""

    def __init__(self, tables: Tables, name: str) -> None:
        self._name = name
        self._values = dict(tables.get(name, {}))
        for key in list(self._values):
            as_before = (name, key) in AS_IN_0_2 and self._values[key] == AS_IN_0_2[name, key]
            if as_before or (name, key) in WITHOUT_EFFECT:
                del self._values[key]

    def take(self, key: str, default: Any = None) -> Any:
        """Value of ``key``, once."""
        return self._values.pop(key, default)

    def rename(self, **names: str) -> Table:
        """Move values to other keys: ``new=old``."""
        for new, old in names.items():
            if old in self._values:
                self._values[new] = self._values.pop(old)
        return self

    def build(self, cls: Callable[..., Any], **more: Any) -> Any:
        """Make torchtitan's dataclass of all that is left; nothing is left after it."""
        known = {f.name for f in dataclasses.fields(cast(Any, cls))}
        self.finish(known)
        values, self._values = {**more, **self._values}, {}
        return cls(**values)

    def finish(self, known: set[str] | None = None) -> None:
        """Refuse what has no place.

        Raises:
            ConfigError: names the first such key.
        """
        for key in self._values:
            if known is None or key not in known:
                raise ConfigError(
                    f"{self._name}.{key} has no counterpart in torchtitan 0.3: remove it,"
                    " or use torchtitan 0.2.2."
                )


def trainer_config(
    config: TitanConfig, config_class: type[Trainer.Config] = Trainer.Config
) -> Trainer.Config:
    """Map the run file and apply ``config.native`` with torchtitan's own command line.

    Args:
        config: the checked run.
        config_class: of the trainer to build.

    Raises:
        ConfigError: a value has no counterpart in torchtitan 0.3, or an unknown model.
        SystemExit: torchtitan's command line refused ``config.native`` (status 2, its own words).
        ValueError: torchtitan refused a value or combination.
    """
    mapped = _map(config.tables, config_class)
    ConfigManager()  # registers torchtitan's rules for lists with custom_registry
    return tyro.cli(config_class, args=list(config.native), default=mapped, registry=custom_registry)


def _map(tables: Tables, config_class: type[Trainer.Config]) -> Trainer.Config:
    for name in ("quantize", "memory_estimation", "experimental"):
        Table(tables, name).finish()
    unknown = set(tables) - set(SECTIONS)
    if unknown:
        raise ConfigError(f"[{min(unknown)}] is not a table that torchtitan 0.3 can be given.")
    cpu = not torch.accelerator.is_available()
    job, model, training = (Table(tables, name) for name in ("job", "model", "training"))
    spec = _model_spec(model.take("name", "llama3"), model.take("flavor", "debugmodel"), cpu)
    assets = model.rename(hf_assets_path="tokenizer_path").take("hf_assets_path", "./tests/assets/tokenizer")
    model.finish()
    debug = Table(tables, "debug")
    result = config_class(
        model_spec=spec,
        hf_assets_path=assets,
        dump_folder=job.take("dump_folder", "./outputs"),
        profiler=Table(tables, "profiling").build(Profiler.Config),
        metrics=Table(tables, "metrics").build(MetricsProcessor.Config),
        dataloader=_dataloader(training, tables.get("training.dataloader", {})),
        optimizer=_optimizer(Table(tables, "optimizer")),
        lr_scheduler=Table(tables, "lr_scheduler").build(LRSchedulersContainer.Config),
        # 0.2.2 has no CUDA graphs, and gradient hooks do not run in a replay.
        training=training.build(TrainingConfig, disable_cuda_graphs=True),
        parallelism=_parallelism(Table(tables, "parallelism")),
        checkpoint=Table(tables, "checkpoint").build(CheckpointManager.Config),
        activation_checkpoint=_activation_checkpoint(Table(tables, "activation_checkpoint")),
        compile=_compile(Table(tables, "compile"), tables),
        comm=Table(tables, "comm").build(CommConfig),
        validator=_validator(Table(tables, "validation"), tables),
        debug=debug.build(
            DebugConfig,
            print_config=job.take("print_config", False),
            save_config_file=job.take("save_config_file"),
        ),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
    )
    job.finish()
    return result


def _model_spec(name: str, flavor: str, cpu: bool) -> Any:
    """torchtitan's model ``name`` in size ``flavor``; a flavor may end in 0.2.2's attention suffix."""
    try:
        module = importlib.import_module(f"torchtitan.models.{name}")
        registry = cast(Callable[..., Any], module.model_registry)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(
            f"model.name is {name!r}, which torchtitan 0.3 cannot load here ({error})."
        ) from error
    if name == "flux":
        raise ConfigError(
            "model.name is 'flux', which has a trainer of its own: only language models are supported."
        )
    flavors = next((v for k, v in vars(module).items() if k.endswith("_configs") and isinstance(v, dict)), {})
    options: dict[str, str] = {}
    for suffix, backend in (
        ("_flex_attn", "flex"),
        ("_flex", "flex"),
        ("_varlen_attn", "varlen"),
        ("_varlen", "varlen"),
    ):
        if flavor not in flavors and flavor.endswith(suffix):
            flavor, options = flavor.removesuffix(suffix), {"attn_backend": backend}
    if flavors and flavor not in flavors:
        raise ConfigError(
            f"model.flavor is {flavor!r}, expected one of {', '.join(map(str, flavors))} for {name}."
        )
    spec = registry(flavor, **options)
    if cpu:
        _attention_for_cpu(spec.model)
    return spec


def _attention_for_cpu(model: Any) -> None:
    """torchtitan 0.3's flex and varlen attention cannot run backward on a CPU."""
    for layer in getattr(model, "layers", ()):
        attention = getattr(layer, "attention", None)
        if attention is not None and hasattr(attention, "inner_attention"):
            attention.inner_attention = ScaledDotProductAttention.Config()


def _dataloader(training: Table, loader: Values) -> Any:
    return HuggingFaceTextDataLoader.Config(
        dataset=training.take("dataset", "c4_test"), dataset_path=training.take("dataset_path"), **loader
    )


def _optimizer(table: Table) -> Any:
    kwargs: dict[str, Any] = {
        "lr": table.take("lr", 8e-4),
        "betas": (table.take("beta1", 0.9), table.take("beta2", 0.95)),
        "eps": table.take("eps", 1e-8),
        "weight_decay": table.take("weight_decay", 0.1),
    }
    group = ParamGroupConfig(
        pattern=r".*", optimizer_name=table.take("name", "AdamW"), optimizer_kwargs=kwargs
    )
    return table.build(OptimizersContainer.Config, param_groups=[group])


def _parallelism(table: Table) -> Any:
    table.take("enable_async_tensor_parallel")  # in [compile] since 0.3
    more: dict[str, Any] = {}
    if numbers(torch.__version__) < (2, 14, 0):
        # The default, spmd_types, needs what FSDP2 has learnt in torch 2.14.
        more["spmd_backend"] = "partial_dtensor"
    return table.build(ParallelismConfig, **more)


def _compile(table: Table, tables: Tables) -> Any:
    asynchronous = tables.get("parallelism", {}).get("enable_async_tensor_parallel", False)
    return table.build(CompileConfig, enable_async_tensor_parallel=asynchronous)


def _activation_checkpoint(table: Table) -> Any:
    mode = table.take("mode", "selective")
    if mode == "none":
        return None
    fqns = table.take("per_op_sac_force_recompute_mm_shapes_by_fqns")
    budget = {k: table.take(k) for k in ("memory_budget", "visualize_memory_budget_pareto")}
    if mode == "memory_budget":
        return table.build(MemoryBudgetAC.Config, **{k: v for k, v in budget.items() if v is not None})
    if mode == "full":
        return table.build(FullAC.Config)
    more = {} if fqns is None else {"force_recompute_mm_shapes_by_fqns": fqns}
    return table.build(SelectiveAC.Config, **more)


def _validator(table: Table, tables: Tables) -> Any:
    training = tables.get("training", {})
    for key, default in (("local_batch_size", 8), ("seq_len", 2048)):
        value = table.take(key)
        if value is not None and value != training.get(key, default):
            raise ConfigError(
                f"validation.{key} is {value}, but torchtitan 0.3 validates with training.{key}"
                f" ({training.get(key, default)}): make them equal."
            )
    loader = HuggingFaceTextDataLoader.Config(
        dataset=table.take("dataset", "c4_validation"),
        dataset_path=table.take("dataset_path"),
        **{"infinite": False, **tables.get("validation.dataloader", {})},
    )
    return table.build(Validator.Config, dataloader=loader)
