"""The training part of a run file: torchtitan 0.2.2's section and key names, for every supported torchtitan.

Kept as plain data, so that a mistake in the file is found before torchtitan (seven seconds of imports) is
loaded, and with the same sentence under each version.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from typing import Any, Literal, cast

from torchft_plus.strict_table import ConfigError, Override, load_table, override_value

Dtype = Literal["bfloat16", "float32"]
Strings = tuple[str, ...]
LOADER: dict[str, Any] = {
    "num_workers": int,
    "persistent_workers": bool,
    "pin_memory": bool,
    "prefetch_factor": int | None,
}

SECTIONS: dict[str, dict[str, Any]] = {
    "job": {
        "config_file": str,
        "dump_folder": str,
        "description": str,
        "print_config": bool,
        "save_config_file": str,
        "custom_config_module": str,
    },
    "profiling": {
        "enable_profiling": bool,
        "save_traces_folder": str,
        "profile_freq": int,
        "profiler_active": int,
        "profiler_warmup": int,
        "enable_memory_snapshot": bool,
        "save_memory_snapshot_folder": str,
    },
    "metrics": {
        "log_freq": int,
        "enable_tensorboard": bool,
        "disable_color_printing": bool,
        "save_tb_folder": str,
        "save_for_all_ranks": bool,
        "enable_wandb": bool,
    },
    "model": {
        "name": str,
        "flavor": str,
        "hf_assets_path": str,
        "tokenizer_path": str,
        "converters": Strings,
        "print_after_conversion": bool,
    },
    "optimizer": {
        "name": Literal["Adam", "AdamW"],
        "lr": float,
        "beta1": float,
        "beta2": float,
        "eps": float,
        "weight_decay": float,
        "implementation": Literal["for-loop", "foreach", "fused"],
        "early_step_in_backward": bool,
    },
    "lr_scheduler": {
        "warmup_steps": int,
        "total_steps": int,
        "decay_ratio": float,
        "decay_type": Literal["linear", "sqrt", "cosine"],
        "min_lr_factor": float,
    },
    "training": {
        "dataset": str,
        "dataset_path": str,
        "local_batch_size": int,
        "global_batch_size": int,
        "seq_len": int,
        "max_norm": float,
        "steps": int,
        "enable_cpu_offload": bool,
        "dtype": Dtype,
        "mixed_precision_param": Dtype,
        "mixed_precision_reduce": Literal["float32"],
        "gc_freq": int,
        "gc_debug": bool,
    },
    "training.dataloader": LOADER,
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": Literal["default", "always", "never"],
        "tensor_parallel_degree": int,
        "disable_loss_parallel": bool,
        "enable_async_tensor_parallel": bool,
        "pipeline_parallel_degree": int,
        "module_fqns_per_model_part": object,
        "pipeline_parallel_first_stage_less_layers": int,
        "pipeline_parallel_last_stage_less_layers": int,
        "pipeline_parallel_layers_per_stage": int,
        "pipeline_parallel_schedule": str,
        "pipeline_parallel_schedule_csv": str,
        "pipeline_parallel_microbatch_size": int,
        "pipeline_parallel_expert_parallel_overlap": bool,
        "context_parallel_degree": int,
        "context_parallel_load_balancer": str,
        "context_parallel_rotate_method": Literal["allgather", "alltoall"],
        "expert_parallel_degree": int,
        "expert_tensor_parallel_degree": int,
        "expert_parallel_comm_backend": Literal["standard", "deepep"],
    },
    "checkpoint": {
        "enable": bool,
        "enable_ft_dataloader_checkpoints": bool,
        "folder": str,
        "interval": int,
        "initial_load_path": str,
        "initial_load_model_only": bool,
        "initial_load_in_hf": bool,
        "initial_load_in_hf_quantized": bool,
        "last_save_model_only": bool,
        "last_save_in_hf": bool,
        "export_dtype": Literal["float16", "bfloat16", "float32"],
        "async_mode": Literal["disabled", "async", "async_with_pinned_mem"],
        "keep_latest_k": int,
        "load_step": int,
        "exclude_from_loading": Strings,
        "enable_first_step_checkpoint": bool,
        "create_seed_checkpoint": bool,
        "load_only": bool,
    },
    "activation_checkpoint": {
        "mode": Literal["selective", "full", "memory_budget", "none"],
        "selective_ac_option": str,
        "per_op_sac_force_recompute_mm_shapes_by_fqns": Strings,
        "early_stop": bool,
        "memory_budget": float,
        "visualize_memory_budget_pareto": bool,
        "preserve_rng_state": bool,
        "determinism_check": str,
        "debug": bool,
    },
    "compile": {"enable": bool, "components": Strings, "backend": str},
    "quantize": {"linear": object, "grouped_mm": object},
    "comm": {
        "init_timeout_seconds": int,
        "train_timeout_seconds": int,
        "trace_buf_size": int,
        "save_traces_folder": str,
        "save_traces_file_prefix": str,
        "mode": Literal["default", "fake_backend", "local_tensor"],
    },
    "memory_estimation": {"enable": bool, "disable_fake_mode": bool},
    "experimental": {"custom_import": str, "custom_args_module": str},
    "validation": {
        "enable": bool,
        "dataset": str,
        "dataset_path": str,
        "local_batch_size": int,
        "seq_len": int,
        "freq": int,
        "steps": int,
    },
    "validation.dataloader": LOADER,
    "debug": {
        "seed": int,
        "deterministic": bool,
        "deterministic_warn_only": bool,
        "moe_force_load_balance": bool,
    },
}
"""Table -> key -> type; a dot in a table's name is a table inside a table; ``object``: left to torchtitan."""

Tables = dict[str, dict[str, Any]]
"""Table -> key -> value, only what was given; tables inside tables under their dotted name."""


def check_tables(document: Mapping[str, Any], *, open_ended: bool) -> Tables:
    """Check the training part of a run file.

    Args:
        document: all tables that are not ours, as tomllib gives them.
        open_ended: leave unknown tables to torchtitan (it was given a custom config module).

    Raises:
        ConfigError: unknown table or key (the nearest known one is named), or wrong type.
    """
    tables: Tables = {}
    for name, table in document.items():
        if name not in SECTIONS or "." in name:
            if open_ended and isinstance(table, dict):
                tables[name] = dict(cast(dict[str, Any], table))
                continue
            raise ConfigError(f"[{name}] is not a known table{_nearest(name)}.")
        if not isinstance(table, dict):
            raise ConfigError(
                f"{name} is a single value or a list of tables, expected a table: write [{name}]."
            )
        rest = dict(cast(dict[str, Any], table))
        for inner in [i for i in rest if f"{name}.{i}" in SECTIONS]:
            tables[f"{name}.{inner}"] = _check(f"{name}.{inner}", rest.pop(inner))
        tables[name] = _check(name, rest)
    return tables


def _check(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and types of one table; lists stay lists."""
    kinds = SECTIONS[name]
    plain: dict[str, Any] = {k: v for k, v in table.items() if kinds.get(k) is not object}
    fields = [(key, kind, None) for key, kind in kinds.items() if kind is not object]
    checked = load_table(make_dataclass("Table", fields), plain, name)
    result = {key: getattr(checked, key) for key in plain}
    result = {key: list(cast(Any, v)) if isinstance(v, tuple) else v for key, v in result.items()}
    return result | {k: v for k, v in table.items() if k not in plain}


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.6)
    return f"; did you mean [{near[0]}]?" if near else f"; known are {', '.join(sorted(SECTIONS))}"


def override(document: Mapping[str, Any], overrides: Sequence[Override]) -> tuple[dict[str, Any], list[str]]:
    """Set command line overrides that name a key of ``SECTIONS``.

    Args:
        document: tables as tomllib gives them; not changed.
        overrides: as ``parse_overrides`` gives them. A bare ``section.no_key`` sets a boolean to false.

    Returns:
        The new document, and the arguments that are left for torchtitan's own command line.

    Raises:
        ConfigError: a value is missing.
    """
    result: dict[str, Any] = {k: _copy(v) for k, v in document.items()}
    rest: list[str] = []
    for section, key, text in overrides:
        path, leaf = f"{section}.{key}".rsplit(".", 1)
        kinds = SECTIONS.get(path, {})
        negated = leaf.removeprefix("no_")
        if leaf in kinds:
            value = _value(text, kinds[leaf], f"{path}.{leaf}")
        elif leaf != negated and kinds.get(negated) is bool and text is None:
            leaf, value = negated, False
        else:
            rest += [f"--{section}.{key}"] if text is None else [f"--{section}.{key}", text]
            continue
        table = result
        for part in path.split("."):
            table = cast(dict[str, Any], table.setdefault(part, {}))
        table[leaf] = value
    return result, rest


def _value(text: str | None, kind: Any, name: str) -> Any:
    if kind is Strings and text is not None and not text.startswith("["):
        return [part for part in text.split(",") if part]  # as torchtitan's command line takes lists
    return override_value(text, kind, name)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in cast(dict[str, Any], value).items()} if isinstance(value, dict) else value
