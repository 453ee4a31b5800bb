# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""One step on every mesh gives the parameters of one device, without gathering an expert bank."""

import functools
import re

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from haliax.quantization import partition_for_grad_overwrite
from jax.sharding import AxisType, Mesh
from levanter.trainer_state import trainables_only

from levanter_marin import axes
from levanter_marin.config import AttentionConfig, MoeConfig
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.groups import Group, rule_of
from levanter_marin.optim.hyperball import NormScope
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype
from levanter_marin.optim.parameters import parameters

EQUAL_ATOL = 1e-6
NORM_RTOL = 1e-6
MAX_FLOPS_OF_UNREPLICATED_BANKS = 0.85  # of the whole update, of which banks are a good third

MODEL = MarinMoeConfig(
    max_seq_len=16,
    hidden_dim=32,
    num_layers=3,  # no mesh axis divides it
    gated_norm_rank=8,
    attention=AttentionConfig(num_heads=4, head_dim=8, num_kv_heads=2, sliding_window=8),
    moe=MoeConfig(num_experts=8, num_experts_per_token=2, expert_dim=24, latent_dim=16, shared_expert_dim=16),
)

# Parameters as Levanter shards them: FSDP over data, experts over the expert axis, MLPs and heads over model.
MAPPING = {axes.EMBED: "data", axes.EXPERTS: "expert", axes.MLP: "model", axes.HEADS: "model"}
MESHES = {
    "fsdp": {"data": 4},
    "expert": {"expert": 4},
    "data_expert": {"data": 2, "expert": 2},
    "data_expert_model": {"data": 2, "expert": 2, "model": 2},
    "levanter": {"replica_dcn": 1, "replica": 2, "data": 4, "model": 1},
}


def mesh_of(shape: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))]).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def mapping_for(mesh: Mesh) -> dict[str, str]:
    return {name: axis for name, axis in MAPPING.items() if axis in mesh.axis_names}


@functools.cache
def model_like(seed: int):
    """Parameters, or a gradient, of the model as the trainer hands them to an optimizer."""
    model = MODEL.build(Axis(axes.VOCAB, 64), key=jax.random.PRNGKey(0))
    tree = partition_for_grad_overwrite(trainables_only(model, True))[1]
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.PRNGKey(seed), len(leaves))
    return structure.unflatten([0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def optimizer(norm_scope: NormScope):
    dtype = NewtonSchulzDtype.fp32
    return HyperballConfig(learning_rate=0.02, warmup=0, norm_scope=norm_scope, newton_schulz_dtype=dtype).build(10)


def step(norm_scope, params, gradient):
    built = optimizer(norm_scope)
    updates, state = built.update(gradient, built.init(params), params)
    return eqx.apply_updates(params, updates), state


@functools.cache
def on_one_device(norm_scope):
    return jax.jit(functools.partial(step, norm_scope))(model_like(0), model_like(1))


def compiled_for(mesh, norm_scope, **mapping_changes):
    """The step as the trainer compiles it, and its sharded arguments."""
    mapping = mapping_for(mesh) | mapping_changes
    arguments = hax.shard((model_like(0), model_like(1)), mapping)
    return hax.named_jit(functools.partial(step, norm_scope), axis_resources=mapping), arguments


@pytest.mark.parametrize(
    ("name", "norm_scope"),
    [(name, NormScope.all_experts) for name in MESHES] + [("data_expert", NormScope.per_expert)],
)
def test_hyperball_step_on_a_mesh_equals_that_on_one_device(name, norm_scope):
    mesh = mesh_of(MESHES[name])
    with hax.partitioning.set_mesh(mesh):
        call, args = compiled_for(mesh, norm_scope)
        params, state = call(*args)
    expected, expected_state = on_one_device(norm_scope)
    for ours, theirs in zip(parameters(params), parameters(expected), strict=True):
        np.testing.assert_allclose(ours.value.array, theirs.value.array, rtol=0, atol=EQUAL_ATOL, err_msg=ours.path)
        if rule_of(ours).group is not Group.adam:
            norms = [np.linalg.norm(np.asarray(x.value.array, np.float64)) for x in (ours, theirs)]
            assert norms[0] == pytest.approx(norms[1], rel=NORM_RTOL), ours.path
    # the momentum is stored as the parameters are
    for ours, parameter in zip(
        jax.tree.leaves(state.inner_state), jax.tree.leaves(expected_state.inner_state), strict=True
    ):
        assert ours.shape == parameter.shape
    momentum = parameters(state.inner_state.inner_states[Group.muonh])
    sharding = {p.path: p.value.array.sharding for p in parameters(params)}
    found = 0
    for leaf in momentum:
        path = next((path for path in sharding if leaf.path.endswith(path)), None)
        if path is not None:
            assert leaf.value.array.sharding.is_equivalent_to(sharding[path], leaf.value.array.ndim), path
            found += 1
    assert found == 23


def bank_gathers(hlo: str) -> list[tuple[int, ...]]:
    """Shapes of the all-gathers that hold matrices of an expert bank, after a check that others are found at all."""
    gathered = [
        tuple(int(n) for n in shape.split(",")) for shape in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", hlo)
    ]
    assert gathered, "replicas of other weights share the work, and gather what they made"
    bank_sides = {(MODEL.moe.latent_dim, MODEL.moe.expert_dim), (MODEL.moe.expert_dim, MODEL.moe.latent_dim)}
    return [shape for shape in gathered if shape[-2:] in bank_sides]


def test_hyperball_compiled_step_gathers_no_expert_bank():
    """Also not with experts over both axes, where no device computes what another one does."""
    mesh = mesh_of({"data": 2, "expert": 4})
    flops = {}
    for experts in ("expert", ("expert", "data")):
        with hax.partitioning.set_mesh(mesh):
            call, args = compiled_for(mesh, NormScope.all_experts, experts=experts)
            compiled = call.lower(*args).compile()
        assert not bank_gathers(compiled.as_text())
        flops[experts] = compiled.cost_analysis()["flops"]
    assert flops["expert", "data"] < MAX_FLOPS_OF_UNREPLICATED_BANKS * flops["expert"]
