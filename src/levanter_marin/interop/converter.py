# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter's checkpoint converter, with what the published formats add to it.

Levanter's own methods do the reading and the sharding. This class writes experts as a bank or one by one, keeps router
biases in fp32 at any dtype of the rest, checks headers before it reads, ships the PyTorch code, and never leaves a
folder that looks complete and is not.
"""

import dataclasses
import json
import logging
import shutil
import tempfile
from collections import UserDict
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.partitioning import ResourceAxis, set_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from levanter.compat.hf_checkpoints import (
    DEFAULT_EXPORT_HOST_BUDGET_BYTES,
    DEFAULT_MAX_SHARD_SIZE,
    MAX_CONCURRENT_HF_SHARDS,
    SAFE_TENSORS_INDEX_NAME,
    SAFE_TENSORS_MODEL,
    HFCheckpointConverter,
    RepoRef,
    _save_tokenizer_pretrained,
    upload_to_hub,
)
from levanter.compat.hf_export import run_on_export_writer, save_hf_shards
from rigging.filesystem.storage_path import StoragePath

from levanter_marin import axes
from levanter_marin.interop import hf_code
from levanter_marin.interop.export_plan import ExportPlan, LoadLeaves, StoredLeaf, check_headers, leaves_of, plan_files
from levanter_marin.interop.folder import CONFIG_NAME, begin, complete, read_stored_tensors, unfinished_name
from levanter_marin.interop.hf_code.configuration_marin_moe import MarinMoeHfConfig
from levanter_marin.interop.hf_config import CODE_FILES, ArtifactSchema, schema_of, to_hf_dict
from levanter_marin.interop.state_dict import (
    ROUTER_BIAS,
    ExpertLayout,
    TensorFormat,
    check_tensors,
)

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

# Keys in which a context stage may differ from the weights it starts from.
_MAY_DIFFER = {"max_position_embeddings", "qk_mult", "sliding_window", "initializer_range"}


@dataclasses.dataclass(frozen=True, init=False)
class MarinMoeConverter(HFCheckpointConverter):
    """`HFCheckpointConverter` for `MarinMoeConfig`.

    Attributes:
        experts: layout of routed experts on write; both are read.
        schema: format on write; None is the oldest that says everything about the model. Both are read.
    """

    experts: ExpertLayout = ExpertLayout.bank
    schema: ArtifactSchema | None = None

    def __init__(
        self,
        LevConfigClass: type,
        reference_checkpoint: RepoRef | str | None = None,
        HfConfigClass: type | None = None,
        tokenizer: Any = None,
        *,
        experts: ExpertLayout = ExpertLayout.bank,
        schema: ArtifactSchema | None = None,
        **options: Any,
    ):
        ref = (
            RepoRef.from_string(reference_checkpoint)
            if isinstance(reference_checkpoint, str)
            else reference_checkpoint
        )
        if tokenizer is None and ref is not None and _is_folder_without_tokenizer(ref.model_name_or_path):
            super().__init__(LevConfigClass, None, HfConfigClass or MarinMoeHfConfig, None, **options)
            object.__setattr__(self, "reference_checkpoint", ref)
        else:
            super().__init__(LevConfigClass, ref, HfConfigClass or MarinMoeHfConfig, tokenizer, **options)
        object.__setattr__(self, "experts", experts)
        object.__setattr__(self, "schema", schema)

    @cached_property
    def Vocab(self) -> Axis:
        """The tokenizer's vocabulary; without one, that of the reference checkpoint."""
        if self.tokenizer is not None:
            return Axis(axes.VOCAB, len(self.tokenizer))
        return Axis(axes.VOCAB, self.default_hf_config.vocab_size)

    def warn_if_tokenizer_mismatch(self, tokenizer: Any) -> None:
        if self.tokenizer is not None:
            super().warn_if_tokenizer_mismatch(tokenizer)

    def plan(
        self, model: Any, dtype: jnp.dtype | None = None, max_shard_size: int = DEFAULT_MAX_SHARD_SIZE
    ) -> ExportPlan:
        """What `save_pretrained` would write of a model, which may be shapes; allocates nothing.

        Raises:
            ValueError: the schema has no place for a component of the model; named.
        """
        schema = schema_of(model.config) if self.schema is None else self.schema
        format = TensorFormat(schema, self.experts)
        files = plan_files(model, format, dtype, max_shard_size)
        return ExportPlan(files, self._hf_dict(model, schema, files), format)

    def _hf_dict(self, model: Any, schema: ArtifactSchema, files: dict[str, tuple[StoredLeaf, ...]]) -> dict[str, Any]:
        out = to_hf_dict(model.config, model.Vocab.size, schema)
        out["dtype"] = str(next(iter(files.values()))[0].spec.dtype)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self.tokenizer, name, None)
            if token is not None:
                out[name] = token
        return out | (self.config_overrides or {})

    def save_pretrained(
        self,
        model: Any,
        path: str,
        upload_to_hf: bool | str | RepoRef | None = False,
        save_reference_code: bool | None = None,
        save_tokenizer: bool = True,
        max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
        export_host_budget_bytes: int = DEFAULT_EXPORT_HOST_BUDGET_BYTES,
        max_concurrent_shards: int = MAX_CONCURRENT_HF_SHARDS,
        save_feature_extractor: bool = False,
        dtype: jnp.dtype | None = None,
        generation_config: dict[str, Any] | None = None,
        chat_template: str | None = None,
        **hf_upload_kwargs: Any,
    ):
        """Write a checkpoint that transformers, vLLM and this package read; see `HFCheckpointConverter`.

        A local folder appears whole, under its name, at the end, and replaces an earlier export. In a remote one
        config.json comes last. Host memory is bounded by `export_host_budget_bytes`, or twice the largest file.
        Router biases are those of the next step and stay fp32 at every `dtype`. Where no mesh is set, that of the
        model's arrays is.

        Raises:
            ValueError: `path` holds something else, or the format has no place for a component of the model.
        """
        plan = self.plan(model, dtype, max_shard_size)
        with _mesh_of(model):
            self.save_leaves(
                plan,
                leaves_of(model),
                path,
                save_tokenizer=save_tokenizer,
                export_host_budget_bytes=export_host_budget_bytes,
                max_concurrent_shards=max_concurrent_shards,
                generation_config=generation_config,
                chat_template=chat_template,
            )
        if upload_to_hf:
            target = self.reference_checkpoint if upload_to_hf is True else upload_to_hf
            upload_to_hub(path, target, **hf_upload_kwargs)

    def save_leaves(
        self,
        plan: ExportPlan,
        load: LoadLeaves,
        path: str,
        *,
        save_tokenizer: bool = True,
        export_host_budget_bytes: int = DEFAULT_EXPORT_HOST_BUDGET_BYTES,
        max_concurrent_shards: int = MAX_CONCURRENT_HF_SHARDS,
        generation_config: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`save_pretrained` of what `plan` lists, from wherever `load` takes it; under a mesh.

        `load` is called once for each file. With `max_concurrent_shards` of 1, a file is written before the next is
        loaded; writing holds its tensors and a copy of their bytes.
        """

        def write(folder: str) -> None:
            by_key = {leaf.key: leaf for leaf in plan.leaves}
            save_hf_shards(
                {file: {leaf.key: leaf.spec for leaf in leaves} for file, leaves in plan.files.items()},
                lambda keys: _ReplicatedOnce(zip(keys, load([by_key[key] for key in keys]), strict=True)),
                folder,
                export_host_budget_bytes=export_host_budget_bytes,
                max_concurrent_shards=max_concurrent_shards,
                tensor_names={key: leaf.names for key, leaf in by_key.items()},
            )

        def write_rest(folder: Path) -> None:
            for name in CODE_FILES:
                shutil.copyfile(Path(hf_code.__file__).with_name(name), folder / name)
            if save_tokenizer and self.tokenizer is not None:
                _save_tokenizer_pretrained(self.tokenizer, str(folder), chat_template=chat_template)
            if generation_config is not None:
                _write_json(folder / "generation_config.json", generation_config)
            if len(plan.files) > 1:
                _write_json(folder / SAFE_TENSORS_INDEX_NAME, plan.index())
            _write_json(folder / CONFIG_NAME, plan.config)

        if "://" in path:
            _write_remote(StoragePath(path), write, write_rest)
        else:
            _write_local(Path(path), plan, write, write_rest)
        logger.info(f"Wrote {len(plan.stored())} tensors, {plan.num_bytes} bytes to {path}")

    def load_state_dict(
        self, ref: str | RepoRef | None = None, dtype: jnp.dtype | None = None
    ) -> dict[str, jax.Array]:
        """Tensors by the names of `to_tensors`, in `dtype` but for router biases, which keep fp32."""
        state = super().load_state_dict(ref)
        for name, value in state.items():
            if name.endswith(ROUTER_BIAS):
                state[name] = value.astype(jnp.float32)
            elif dtype is not None and jnp.issubdtype(value.dtype, jnp.floating):
                state[name] = value.astype(dtype)
        return state

    def load_pretrained(
        self,
        lm_model_cls: Any,
        ref: str | RepoRef | None = None,
        config: Any = None,
        axis_mapping: Any = None,
        resize_vocab_to_match_tokenizer: bool = False,
        dtype: jnp.dtype | None = None,
    ) -> Any:
        """As upstream's; a local checkpoint's files, names and shapes are checked before the first weight is read.

        Raises:
            ValueError: a file is damaged, a tensor is missing, unknown or of another shape, or `config` computes
                something else than the checkpoint's config.json says. The message names which.
        """
        hf_config = self.hf_config_from_hf_checkpoint(ref)
        stored_config = self.config_from_hf_config(hf_config)
        config = stored_config if config is None else config
        _compare_configs(config, stored_config, hf_config.vocab_size)
        folder = Path(self._get_ref(ref)[0])
        if (folder / SAFE_TENSORS_INDEX_NAME).is_file() or (folder / SAFE_TENSORS_MODEL).is_file():
            Vocab = Axis(axes.VOCAB, hf_config.vocab_size)
            model = eqx.filter_eval_shape(config.model_type.init, Vocab, config, key=jax.random.PRNGKey(0))
            check_tensors(model, {n: t.shape for n, t in read_stored_tensors(folder).items()}, str(folder))
        return super().load_pretrained(lm_model_cls, ref, config, axis_mapping, resize_vocab_to_match_tokenizer, dtype)


class _ReplicatedOnce(UserDict[str, jax.Array]):
    """Tensors, each whole on every device when it is taken out; upstream's `reshard` does so on explicit meshes only.

    One at a time and once, so that devices hold the rest of a file's tensors sharded and one of them whole.
    """

    def __getitem__(self, key: str) -> jax.Array:
        value = self.data.pop(key)
        if isinstance(value.sharding, NamedSharding):
            return jax.device_put(value, NamedSharding(value.sharding.mesh, PartitionSpec()))
        return value


def _mesh_of(model: Any) -> AbstractContextManager:
    """The surrounding mesh; where there is none, that of the model's arrays, or one of the device they are on."""
    if not jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    shardings = (leaf.sharding for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array))
    sharding = next(shardings, SingleDeviceSharding(jax.local_devices()[0]))
    if isinstance(sharding, NamedSharding):
        return set_mesh(sharding.mesh)
    (device,) = sharding.device_set
    return set_mesh(Mesh(np.array([device]), (ResourceAxis.DATA,)))


def _is_folder_without_tokenizer(path: str) -> bool:
    folder = Path(path)
    return folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _write_local(path: Path, plan: ExportPlan, write: Any, write_rest: Any) -> None:
    run_on_export_writer(lambda: begin(path))
    unfinished = unfinished_name(path)

    def finish() -> None:
        write_rest(unfinished)
        check_headers(unfinished, plan)
        complete(path)

    try:
        write(str(unfinished))
        run_on_export_writer(finish)
    except Exception:
        if jax.process_index() == 0:  # without a collective: other processes may not have failed
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_remote(path: StoragePath, write: Any, write_rest: Any) -> None:
    def invalidate() -> None:
        if (path / CONFIG_NAME).exists():
            (path / CONFIG_NAME).unlink()

    def finish() -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_rest(Path(folder))
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == CONFIG_NAME):
                (path / file.name).upload_from(str(file))

    run_on_export_writer(invalidate)
    write(str(path))
    run_on_export_writer(finish)


def _compare_configs(given: Any, stored: Any, vocab_size: int) -> None:
    ours, theirs = (to_hf_dict(config, vocab_size, ArtifactSchema.two) for config in (given, stored))
    for attention in (ours, theirs):
        for name in ("local_kv_heads", "global_kv_heads"):
            attention[name] = attention["num_key_value_heads"] if attention[name] is None else attention[name]
    different = {name for name in ours if ours[name] != theirs[name]}
    if not ours["sconv"] and not theirs["sconv"]:
        different -= {"sconv_kernel"}
    if different & _MAY_DIFFER:
        logger.warning("The given config differs from the checkpoint's: " + _differences(different, ours, theirs))
    if different - _MAY_DIFFER:
        raise ValueError(
            f"the given config is not the checkpoint's: {_differences(different - _MAY_DIFFER, ours, theirs)}; "
            "take over the checkpoint's (use_hf_model_config: true) or correct the given one"
        )


def _differences(names: set[str], ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return ", ".join(f"{name} {ours[name]} (checkpoint: {theirs[name]})" for name in sorted(names))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
