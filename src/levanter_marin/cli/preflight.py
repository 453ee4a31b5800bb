# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What `levanter-marin train` checks before the run, and what it makes of an error during one."""

import linecache
import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType

import wandb
from haliax.partitioning import ResourceMapping
from levanter.data.text.datasets import DatasetComponent, LmDataConfig, UrlDatasetSourceConfig
from levanter.main.train_lm import TrainLmConfig
from levanter.utils.mesh import MeshConfig
from rigging.filesystem.storage_path import StoragePath

from levanter_marin import axes
from levanter_marin.cli.errors import UserError
from levanter_marin.models.marin_moe import MarinMoeConfig

_CORPUS_HINT = "`levanter-marin corpus` makes a corpus and a tokenizer folder without network"
_CACHE_LEDGER = "shard_ledger.json"
_VALIDATING_PACKAGES = ("levanter", "levanter_marin")


def check_data(data: LmDataConfig) -> None:
    """Refuses a tokenizer that cannot be loaded and local text files that do not exist.

    Raises:
        UserError: names the path and what makes one.
    """
    try:
        _ = data.the_tokenizer  # cached, so the run does not load it again
    except Exception as error:
        if os.path.isdir(data.tokenizer):
            fault = "is a folder without a readable tokenizer.json"
        else:
            fault = "is neither a folder here nor a tokenizer that could be fetched from Hugging Face"
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise UserError(f"data.tokenizer={data.tokenizer} {fault} ({reason}); {_CORPUS_HINT}") from error

    for name, component in data.components.items():
        if not isinstance(component, DatasetComponent) or not isinstance(component.source, UrlDatasetSourceConfig):
            continue
        for split in ("train", "validation"):
            if _is_cached(data, name, component, split):
                continue
            missing = [url for url in component.source.urls_for_split(split) if _is_missing(url)]
            if missing:
                raise UserError(
                    f"data.components.{name}.source.{split}_urls: no file {', '.join(missing)}; {_CORPUS_HINT}"
                )


def check_sizes(config: TrainLmConfig) -> None:
    """Refuses a number of steps or rows that is none, and sequences longer than the model's.

    Raises:
        UserError: names the field and what it may be.
    """
    trainer, longest, length = config.trainer, config.model.max_seq_len, config.train_seq_len
    fields = [("trainer.num_train_steps", trainer.num_train_steps)]
    if not isinstance(trainer.train_batch_size, Sequence):  # a schedule
        fields.append(("trainer.train_batch_size", trainer.train_batch_size))
    for field, value in fields:
        if not isinstance(value, int) or value <= 0:
            raise UserError(f"{field}={value} must be a positive number")
    if length is not None and length > longest:
        raise UserError(
            f"train_seq_len={length} exceeds model.max_seq_len={longest}; set train_seq_len to {longest} or less, or "
            f"model.max_seq_len to {length}"
        )


def check_hf_export(config: TrainLmConfig) -> None:
    """Refuses a model that the first export of a run would refuse.

    Raises:
        UserError: names the component that the format has no place for.
    """
    if config.hf_save_path is None or not isinstance(config.model, MarinMoeConfig):
        return
    try:
        config.model.to_hf_config(vocab_size=1)
    except ValueError as error:
        raise UserError(f"hf_save_path: {error}") from error


def check_mesh(
    mesh: MeshConfig, model: MarinMoeConfig, train_batch_size: int, *, num_devices: int, num_slices: int = 1
) -> None:
    """Refuses a mesh over whose axes the batch, the experts, the heads or the experts' width do not divide.

    Raises:
        UserError: names the field, its value, the size of the mesh axes, and what would fit.
    """
    try:
        within, between = mesh.axis_shapes(num_devices, num_slices)
    except ValueError as error:
        raise UserError(
            f"trainer.mesh.axes={dict(mesh.axes)} does not fit {num_devices} devices ({error}); set the sizes so that "
            f"their product is {num_devices // num_slices}, or one of them to -1; a CPU has more devices with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N"
        ) from error
    sizes = {**within, **between}
    mapping = mesh.resolved_compute_mapping
    spread = _mesh_axes(mapping, axes.EXPERTS, sizes)
    of_batch = _mesh_axes(mapping, axes.BATCH, sizes)
    if sizes.get(axes.EXPERT_MESH_AXIS, 1) > 1 and spread and axes.EXPERT_MESH_AXIS not in of_batch:
        raise UserError(
            f"trainer.mesh spreads experts over `{axes.EXPERT_MESH_AXIS}` of size {sizes[axes.EXPERT_MESH_AXIS]} but "
            f"the batch over {of_batch}, so every token would be sent {sizes[axes.EXPERT_MESH_AXIS]} times; set "
            f"trainer.mesh.compute_mapping.batch to {[*of_batch, axes.EXPERT_MESH_AXIS]}"
        )
    attention, moe = model.attention, model.moe
    fields = [
        ("trainer.train_batch_size", train_batch_size, axes.BATCH),
        ("model.moe.num_experts", moe.num_experts, axes.EXPERTS),
        ("model.attention.num_heads", attention.num_heads, axes.HEADS),
        ("model.attention.num_kv_heads", attention.num_kv_heads, axes.KV_HEAD),
        ("model.moe.expert_dim", moe.expert_dim, axes.MLP),
    ]
    if moe.num_shared_experts > 0:
        fields.append(("model.moe.shared_expert_dim", moe.shared_expert_dim, axes.MLP))
    for field, size, axis in fields:
        names = _mesh_axes(mapping, axis, sizes)
        shards = math.prod(sizes[name] for name in names)
        if size % shards != 0:
            raise UserError(
                f"{field}={size} does not divide over the {shards} devices of the mesh axes {", ".join(names)}; "
                f"set it to {math.ceil(size / shards) * shards}, or those axes to {math.gcd(size, shards)}"
            )


def _mesh_axes(mapping: ResourceMapping, axis: str, sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes of more than one device that a tensor axis is mapped to."""
    names = mapping.get(axis, ())
    return [name for name in ((names,) if isinstance(names, str) else names) if sizes.get(name, 1) > 1]


def mistake_behind(error: Exception) -> str | None:
    """The line for the user when `error`, raised during a run, is the user's to mend; None for any other error."""
    if isinstance(error, RuntimeError) and "No accelerator found" in str(error):
        return "no GPU or TPU found; set trainer.require_accelerator: false to train on the CPU"
    if isinstance(error, ModuleNotFoundError) and error.name == "tensorboardX":
        return "the tensorboard tracker needs a package more: pip install tensorboardX"
    if isinstance(error, wandb.errors.Error):
        reason = str(error).rstrip(".")
        return f"W&B: {reason}; without an account set trainer.tracker: {{type: wandb, mode: offline}} or json_lines"
    if isinstance(error, ValueError) and error.__traceback__ is not None and _is_refusal(error.__traceback__):
        return str(error)
    return None


def _is_cached(data: LmDataConfig, name: str, component: DatasetComponent, split: str) -> bool:
    root = component.cache_dir
    if root is None:
        if data.cache_dir is None:
            return False
        root = os.path.join(data.cache_dir, name)
    path = root if component.flat_cache else os.path.join(root, split)
    return (StoragePath(path) / _CACHE_LEDGER).exists()


def _is_missing(url: str) -> bool:
    if "://" in url:  # remote stores are slow to ask and tell it well enough themselves
        return False
    return not any(match.exists() for match in StoragePath(url).expand_glob())


def _is_refusal(traceback: TracebackType) -> bool:
    """Whether the error comes from a `raise` statement of Levanter or of this package: a check refused a value."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    statement = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno).lstrip()
    return package in _VALIDATING_PACKAGES and statement.startswith("raise ")
