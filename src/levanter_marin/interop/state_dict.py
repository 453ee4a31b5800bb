# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Published tensor names and layouts, and the leaves of the model, both ways.

The leaves of a layer already carry the published names, so a table of their axes is all there is to know. Everything
here is a pure function of arrays: it runs under `jit`, where unused tensors cost nothing, and under `eval_shape`,
where nothing is allocated.
"""

import operator
import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, Stacked
from haliax.state_dict import ModuleWithStateDictSerialization, StateDict

from levanter_marin import axes
from levanter_marin.interop.hf_config import ArtifactSchema
from levanter_marin.models.block import Block
from levanter_marin.moe.router_bias import RouterBias

ROUTER_BIAS = "mlp.router.bias"
_LAYER = "model.layers.{}."
_MATRIX_NAMES = ("gate_proj", "up_proj", "down_proj")
_EXPERT_NAME = re.compile(r"(?P<bank>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<rest>.*)")
_SHOWN = 5


class ExpertLayout(StrEnum):
    """How routed experts are stored: one [experts, out, in] tensor a projection, or a matrix an expert."""

    bank = "bank"
    per_expert = "per_expert"


class TensorFormat(NamedTuple):
    """What two checkpoints of the same weights may differ in."""

    schema: ArtifactSchema = ArtifactSchema.two
    experts: ExpertLayout = ExpertLayout.bank


_D, _HEAD = axes.EMBED, (axes.HEADS, axes.HEAD_SIZE)
_KV = (axes.KV_HEAD, axes.HEAD_SIZE)

# Published name within a layer -> its dimensions, each one axis or several flattened into one.
_LAYER_LAYOUT: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "input_layernorm.weight": (_D,),
    "attn_gated_norm.down_proj.weight": (axes.GATE_RANK, _D),
    "attn_gated_norm.up_proj.weight": (_D, axes.GATE_RANK),
    "self_attn.q_proj.weight": (_HEAD, _D),
    "self_attn.k_proj.weight": (_KV, _D),
    "self_attn.v_proj.weight": (_KV, _D),
    "self_attn.o_proj.weight": (_D, _HEAD),
    "self_attn.attn_gate.weight": (axes.HEADS, _D),
    "self_attn.sconv_k.weight": (axes.CONV_TAP, _KV),
    "self_attn.sconv_v.weight": (axes.CONV_TAP, _KV),
    "sconv_attn.weight": (axes.CONV_TAP, _D),
    "post_attention_layernorm.weight": (_D,),
    "mlp_gated_norm.down_proj.weight": (axes.GATE_RANK, _D),
    "mlp_gated_norm.up_proj.weight": (_D, axes.GATE_RANK),
    "mlp.router.weight": (axes.ROUTER_EXPERTS, _D),
    ROUTER_BIAS: (axes.ROUTER_EXPERTS,),
    "mlp.experts.gate_proj.weight": (axes.EXPERTS, axes.MLP, axes.LATENT),
    "mlp.experts.up_proj.weight": (axes.EXPERTS, axes.MLP, axes.LATENT),
    "mlp.experts.down_proj.weight": (axes.EXPERTS, axes.LATENT, axes.MLP),
    "mlp.latent_down_proj.weight": (axes.LATENT, _D),
    "mlp.latent_norm.weight": (axes.LATENT,),
    "mlp.latent_up_proj.weight": (_D, axes.LATENT),
    "sconv_mlp.weight": (axes.CONV_TAP, _D),
}
_SHARED_EXPERT_LAYOUT = {"gate_proj": (axes.MLP, _D), "up_proj": (axes.MLP, _D), "down_proj": (_D, axes.MLP)}

# Published name -> our path and dimensions, outside the layers.
_OUTER_LAYOUT: dict[str, tuple[str, tuple[str, ...]]] = {
    "model.embed_tokens.weight": ("embeddings.token_embeddings.weight", (axes.VOCAB, _D)),
    "model.embed_norm.weight": ("embeddings.norm.weight", (_D,)),
    "model.embed_gated_norm.down_proj.weight": ("embeddings.gated_norm.down_proj.weight", (axes.GATE_RANK, _D)),
    "model.embed_gated_norm.up_proj.weight": ("embeddings.gated_norm.up_proj.weight", (_D, axes.GATE_RANK)),
    "model.norm.weight": ("transformer.norm.weight", (_D,)),
    "model.final_gated_norm.down_proj.weight": (
        "transformer.final_gated_norm.down_proj.weight",
        (axes.GATE_RANK, _D),
    ),
    "model.final_gated_norm.up_proj.weight": ("transformer.final_gated_norm.up_proj.weight", (_D, axes.GATE_RANK)),
    "lm_head.weight": ("lm_head.weight", (axes.VOCAB, _D)),
}


class LanguageModel(Protocol):
    """What is read of a `MarinMoeLMHeadModel`."""

    embeddings: Any
    transformer: Any
    lm_head: Any


class TensorSource(NamedTuple):
    """Where a model has what one published tensor is made of."""

    path: str
    """Dotted; there is a `NamedArray` or a `RouterBias`."""
    layer: int | None
    """Index into the layer axis of what is at `path`, its first; None if it has none."""
    dims: tuple[str | tuple[str, ...], ...]
    """Dimensions of the tensor, each one axis or several flattened into one."""


def tensor_sources(model: LanguageModel) -> dict[str, TensorSource]:
    """The source of every tensor of `to_tensors`, by its name there; `model` may be shapes."""
    out = {name: TensorSource(path, None, dims) for name, (path, dims) in _outer(model).items()}
    layers = model.transformer.layers
    scanned = isinstance(layers, Stacked)
    for i in range(layers.Block.size):
        block = "transformer.layers." + ("stacked" if scanned else f"blocks.{i}")
        for name, dims in _layer_layout(_template_block(layers)).items():
            out[_LAYER.format(i) + name] = TensorSource(f"{block}.{name}", i if scanned else None, dims)
    return out


def to_tensors(model: LanguageModel) -> dict[str, jax.Array]:
    """Every parameter and every router bias by its published name, in schema 2 with expert banks.

    Arrays keep their dtype; a router bias, which the next step would use, is fp32. Gradients work too: the "bias" in
    a gradient is the next step's.
    """
    return {name: flattened(_leaf_at(model, source), source.dims) for name, source in tensor_sources(model).items()}


def from_tensors(template: Any, tensors: Mapping[str, jax.Array]) -> Any:
    """The model with every leaf replaced.

    Args:
        template: a `MarinMoeLMHeadModel` of arrays, or of their shapes; it gives axes and container (scan or not).
        tensors: as `to_tensors` gives them; check them with `check_tensors` first.
    """
    values = {
        name: _unflattened(tensors[name], source.dims, _leaf_at(template, source))
        for name, source in tensor_sources(template).items()
    }
    outer = _outer(template)
    model = _replaced(template, [path for path, _ in outer.values()], [values[name] for name in outer])
    layers = model.transformer.layers
    layout = _layer_layout(_template_block(layers))
    per_layer = [[values[_LAYER.format(i) + name] for name in layout] for i in range(layers.Block.size)]
    if isinstance(layers, Stacked):
        stacked = [
            hax.tree_util.tree_map(lambda *parts: hax.stack(layers.Block, parts), *same)
            for same in zip(*per_layer, strict=True)
        ]
        new_layers = eqx.tree_at(lambda m: m.stacked, layers, _replaced(layers.stacked, list(layout), stacked))
    else:
        blocks = [_replaced(b, list(layout), v) for b, v in zip(layers.blocks, per_layer, strict=True)]
        new_layers = eqx.tree_at(lambda m: m.blocks, layers, blocks)
    return eqx.tree_at(lambda m: m.transformer.layers, model, new_layers)


def manifest(model: LanguageModel, format: TensorFormat = TensorFormat()) -> dict[str, jax.ShapeDtypeStruct]:
    """Name, shape and dtype of every stored tensor, allocating nothing; `model` may be shapes."""
    shapes = eqx.filter_eval_shape(to_tensors, model)
    return {
        name: jax.ShapeDtypeStruct(shapes[source].shape if whole else shapes[source].shape[1:], shapes[source].dtype)
        for source in shapes
        for name, whole in _stored(source, shapes[source].shape, format)
    }


def stored_names(name: str, shape: tuple[int, ...], format: TensorFormat) -> tuple[str, ...]:
    """Under which names `format` stores the tensor that `to_tensors` calls `name`: one, or one a leading index."""
    return tuple(stored for stored, _ in _stored(name, shape, format))


def _stored(name: str, shape: tuple[int, ...], format: TensorFormat) -> Iterable[tuple[str, bool]]:
    if format.experts is ExpertLayout.per_expert and ".mlp.experts." in name:
        bank, rest = name.split(".experts.")
        return [(f"{bank}.experts.{i}.{rest}", False) for i in range(shape[0])]
    if format.schema is ArtifactSchema.one:
        name = name.replace(".shared_experts.0.", ".shared_expert.")
    return [(name, True)]


def detect_format(names: Collection[str]) -> TensorFormat:
    """The format that most likely wrote these names; where they mix, `check_tensors` tells."""
    schema = ArtifactSchema.one if any(".shared_expert." in name for name in names) else ArtifactSchema.two
    per_expert = any(_EXPERT_NAME.fullmatch(name) for name in names)
    return TensorFormat(schema, ExpertLayout.per_expert if per_expert else ExpertLayout.bank)


def check_tensors(
    model: LanguageModel, shapes: Mapping[str, tuple[int, ...]], source: str = "the checkpoint"
) -> TensorFormat:
    """Compare the tensors of a checkpoint with those that a model needs, in either layout and schema.

    Returns:
        the format that the checkpoint is in.

    Raises:
        ValueError: names the tensors that are missing, not known, or of another shape, with both shapes.
    """
    format = detect_format(shapes)
    wanted = {name: spec.shape for name, spec in manifest(model, format).items()}
    problems = shape_problems(wanted, shapes)
    if problems:
        raise ValueError(f"{source} does not fit its config: {problems}")
    return format


def shape_problems(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Names of tensors that are missing, not wanted, or of another shape, with both shapes; empty if all fit."""
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    wrong = [
        f"{name} is {tuple(found[name])} where the config asks for {tuple(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    return "; ".join(
        f"{text}: {_listed(names)}"
        for text, names in (
            ("missing tensors", missing),
            ("tensors that the model does not have", unknown),
            ("shapes that do not fit", wrong),
        )
        if names
    )


def canonical_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of any format under the names and shapes of `to_tensors`; experts are stacked into banks."""
    out, banks = {}, {}
    for name, value in tensors.items():
        match = _EXPERT_NAME.fullmatch(name)
        if match is None:
            out[name.replace(".shared_expert.", ".shared_experts.0.")] = value
        else:
            banks.setdefault(f"{match['bank']}.{match['rest']}", {})[int(match["expert"])] = value
    return out | {name: jnp.stack([experts[i] for i in sorted(experts)]) for name, experts in banks.items()}


class TensorView(ModuleWithStateDictSerialization):
    """A model as its published tensors: what Haliax's state dicts see of a `MarinMoeLMHeadModel`."""

    tensors: dict[str, jax.Array]

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        return {_prefixed(prefix, name): value for name, value in self.tensors.items()}

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "TensorView":
        start = _prefixed(prefix, "")
        given = {name.removeprefix(start): value for name, value in state_dict.items() if name.startswith(start)}
        return TensorView(canonical_tensors(given))

    def unflatten_from_export(self, template: Any) -> Any:  # pyrefly: ignore[bad-override]
        check_tensors(template, {name: value.shape for name, value in self.tensors.items()})
        return from_tensors(template, self.tensors)


def _prefixed(prefix: str | None, name: str) -> str:
    return name if prefix is None else f"{prefix}.{name}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def get_path(tree: Any, path: str) -> Any:
    """An attribute or a tuple's entry at the end of a dotted path; None where a component is switched off."""
    for step in path.split("."):
        if tree is None:
            return None
        if step.isdigit():
            tree = tree[int(step)] if int(step) < len(tree) else None
        else:
            tree = getattr(tree, step)
    return tree


def _replaced(tree: Any, paths: list[str], values: list[Any]) -> Any:
    def where(tree: Any) -> list[Any]:
        return [get_path(tree, path) for path in paths]

    return eqx.tree_at(where, tree, values, is_leaf=lambda node: isinstance(node, NamedArray | RouterBias))


def _outer(model: LanguageModel) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: entry for name, entry in _OUTER_LAYOUT.items() if get_path(model, entry[0]) is not None}


def _template_block(layers: Stacked[Block] | BlockSeq[Block]) -> Block:
    return layers.stacked if isinstance(layers, Stacked) else layers.blocks[0]


def _layer_layout(block: Block) -> dict[str, tuple]:
    """Names and dimensions of the leaves that a block has."""
    shared = {
        f"shared_experts.{j}.{matrix}.weight": _SHARED_EXPERT_LAYOUT[matrix]
        for j in range(len(block.shared_experts))
        for matrix in _MATRIX_NAMES
    }
    return {name: dims for name, dims in (_LAYER_LAYOUT | shared).items() if get_path(block, name) is not None}


def _leaf_at(model: LanguageModel, source: TensorSource) -> Any:
    leaf, layer, Layers = get_path(model, source.path), source.layer, model.transformer.layers.Block
    if layer is None:
        return leaf
    return hax.tree_util.tree_map(lambda stacked: _index(stacked, Layers, layer), leaf)


def _index(leaf: NamedArray, Layers: Axis, i: int) -> NamedArray:
    if isinstance(leaf.array, jax.ShapeDtypeStruct):
        return eqx.filter_eval_shape(lambda leaf: leaf[Layers, i], leaf)
    return leaf[Layers, i]


def flattened(leaf: NamedArray | RouterBias, dims: tuple) -> jax.Array:
    """A tensor of `dims`, as `TensorSource` has them, from the leaf of one layer or outside the layers."""
    if isinstance(leaf, RouterBias):
        leaf = leaf.value()
    ordered = leaf.rearrange(_axis_names(dims))
    return ordered.array.reshape(_shape(ordered, dims))


def _unflattened(value: jax.Array, dims: tuple, like: NamedArray | RouterBias) -> NamedArray | RouterBias:
    if isinstance(like, RouterBias):
        Experts = like.bias.high.resolve_axis(dims[0])
        return RouterBias.from_value(hax.named(value, Experts), hax.named(jnp.zeros((), jnp.float32), ()))
    ordered = [like.resolve_axis(name) for name in _axis_names(dims)]
    named = hax.named(value.reshape([axis.size for axis in ordered]), ordered)
    return hax.auto_sharded(named.rearrange(like.axes))


def _axis_names(dims: tuple) -> tuple[str, ...]:
    return tuple(name for dim in dims for name in ((dim,) if isinstance(dim, str) else dim))


def _shape(leaf: NamedArray, dims: tuple) -> tuple[int, ...]:
    sizes = {axis.name: axis.size for axis in leaf.axes}
    return tuple(
        operator.index(hax.axis_size([Axis(n, sizes[n]) for n in ((dim,) if isinstance(dim, str) else dim)]))
        for dim in dims
    )
