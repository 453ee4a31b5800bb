# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A plan against what JAX allocates, lowers and multiplies."""

import dataclasses
import math
import re

import abstract_runs as runs
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import pytest
from haliax import Axis
from levanter.optim.config import AdamConfig

from levanter_marin import axes
from levanter_marin.analysis.device_plan import plan_device
from levanter_marin.analysis.train_state import abstract_batch, abstract_mesh, with_mesh_sizes
from levanter_marin.config import (
    AttentionImplementation,
    DispatchConfig,
    DispatchImplementation,
    QuantileBalancingConfig,
    QuantileEstimator,
)
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation
from levanter_marin.optim.config import HyperballConfig

FLOPS_RTOL = 0.02
ACTIVATION_FACTOR = 2.0

RAGGED, PADDED = DispatchImplementation.ragged_all_to_all, DispatchImplementation.padded_all_to_all
EIGHT_DEVICES = with_mesh_sizes(runs.EXPERT_PARALLEL, {"data": 2, "expert": 2, "model": 2})


def bytes_on_first_device(tree) -> int:
    first = jax.devices()[0]
    shards = (shard for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


@pytest.mark.parametrize(
    "optimizer",
    (pytest.param(AdamConfig(), id="adam"), pytest.param(HyperballConfig(), id="hyperball", marks=pytest.mark.slow)),
)
def test_plan_of_parameters_and_optimizer_state_equals_bytes_of_levanters_state(optimizer):
    config = runs.train_config(runs.toy_model(), EIGHT_DEVICES, 8)
    config.optimizer = optimizer
    planned = plan_device(config, runs.VOCAB_SIZE, abstract_mesh(EIGHT_DEVICES)).bytes
    trainer = runs.trainer_of(config)
    with (
        hax.partitioning.set_mesh(config.trainer.device_mesh),
        hax.axis_mapping(config.trainer.parameter_axis_mapping),
    ):
        Vocab = Axis(axes.VOCAB, runs.VOCAB_SIZE)
        state = trainer.initial_state(
            jax.random.PRNGKey(0), model_init=lambda: config.model.build(Vocab, key=jax.random.PRNGKey(0))
        )
    assert planned.parameters == bytes_on_first_device(state.model)
    assert planned.optimizer_state == bytes_on_first_device(state.opt_state)


def compiled_gradient(config):
    """Loss and gradient as Levanter's trainer computes them, on the mesh of all devices; compiled, never run."""
    trainer, key, Vocab = runs.trainer_of(config), jax.random.PRNGKey(0), Axis(axes.VOCAB, runs.VOCAB_SIZE)
    compute, parameters = trainer.compute_axis_mapping, trainer.parameter_axis_mapping
    shape = abstract_batch(config.trainer.train_batch_size, config.model.max_seq_len)

    def gradient(model, batch):
        return trainer._compute_gradients_microbatched(trainer.loss_fn, model, batch, key=key)[1]

    with hax.partitioning.set_mesh(trainer.device_mesh), hax.axis_mapping(parameters):
        model = hax.named_jit(lambda: config.model.build(Vocab, key=key), axis_resources=parameters)()
        batch = hax.shard(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape), compute)
        jitted = hax.named_jit(gradient, axis_resources=compute, out_axis_resources=parameters)
        return jitted.lower(model, batch).compile()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "overrides"),
    (("f32", {}), ("p=f32,c=bf16", {"gradient_checkpointing": False})),
    ids=("fp32", "bf16, no checkpoint"),
)
def test_plan_has_exact_gradients_and_activations_within_a_factor_of_compiled_ones(precision, overrides):
    mesh = with_mesh_sizes(runs.EXPERT_PARALLEL, {"data": 8})
    model = runs.toy_model(max_seq_len=128, hidden_dim=64, **overrides)
    config = runs.train_config(model, mesh, 64, mp=jmp.get_policy(precision))
    planned = plan_device(config, runs.VOCAB_SIZE, abstract_mesh(mesh), GroupedMatmulImplementation.blocked).bytes
    compiled = compiled_gradient(config)

    outputs = zip(jax.tree.leaves(compiled.out_info), jax.tree.leaves(compiled.output_shardings), strict=True)
    shards = [(math.prod(sharding.shard_shape(leaf.shape)), leaf.dtype.itemsize) for leaf, sharding in outputs]
    assert planned.gradients == sum(size * itemsize for size, itemsize in shards)

    temporary = compiled.memory_analysis().temp_size_in_bytes
    estimate = planned.cast_weights + planned.cast_gradients + planned.working
    print(f"{precision} {overrides}: planned {estimate} bytes, XLA {temporary}, ratio {estimate / temporary:.2f}")
    assert 1 / ACTIVATION_FACTOR <= estimate / temporary <= ACTIVATION_FACTOR


def exchange_config(implementation, latent_dim, remat):
    dispatch = DispatchConfig(implementation=implementation)
    model = runs.replace_moe(
        runs.toy_model(gradient_checkpointing=remat), num_experts=16, latent_dim=latent_dim, dispatch=dispatch
    )
    mesh = with_mesh_sizes(runs.EXPERT_PARALLEL, {"data": 2, "expert": 4})
    return runs.train_config(model, mesh, 16, mp=jmp.get_policy("p=f32,c=bf16")), abstract_mesh(mesh)


def lowered_exchanges(config, mesh, operation):
    """The tensor types of every such operation in the train step as lowered for a GPU; loop bodies stand once."""
    text = runs.trace_train_step(config, runs.VOCAB_SIZE, mesh).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if operation in line]
    return [re.findall(r"tensor<(\d+(?:x\d+)*)x(bf16|i32)>", line.split(" : ")[-1]) for line in lines]


@pytest.mark.parametrize("remat", (True, False), ids=("checkpoint", "no checkpoint"))
def test_planned_ragged_exchange_equals_operations_of_the_lowered_step(remat):
    config, mesh = exchange_config(RAGGED, 16, remat)
    exchange = plan_device(config, runs.VOCAB_SIZE, mesh).exchange
    operations = lowered_exchanges(config, mesh, "@ragged_all_to_all")
    chunks, width = config.model.moe.dispatch.expert_chunks, exchange.row_bytes // 2
    # two layers stand in the body of the loop over groups
    assert len(operations) == exchange.trips * chunks * config.model.num_layers
    rows_of_chunk = exchange.receive_rows // chunks
    expected = {(f"{exchange.assignments}x{width}", "bf16"), (f"{rows_of_chunk}x{width}", "bf16")}
    assert all(set(types[:2]) == expected for types in operations)


@pytest.mark.parametrize("latent_dim", (16, None), ids=("latent", "no latent"))
def test_planned_padded_exchange_equals_bytes_of_the_lowered_step(latent_dim):
    config, mesh = exchange_config(PADDED, latent_dim, True)
    plan = plan_device(config, runs.VOCAB_SIZE, mesh)
    operands = [types[0] for types in lowered_exchanges(config, mesh, "stablehlo.all_to_all")]
    sizes = [math.prod(int(n) for n in shape.split("x")) for shape, dtype in operands if dtype == "bf16"]
    assert 2 * sum(sizes) == plan.all_to_all_bytes


def test_latent_experts_halve_the_planned_all_to_all_bytes():
    sent = [plan_device(*_args(exchange_config(RAGGED, latent, True))).all_to_all_bytes for latent in (16, None)]
    assert sent[0] > 0
    assert sent[0] * 2 == sent[1]


def _args(config_and_mesh):
    config, mesh = config_and_mesh
    return config, runs.VOCAB_SIZE, mesh


@pytest.mark.parametrize("remat", (True, False), ids=("checkpoint", "no checkpoint"))
def test_planned_flops_equal_counted_dot_products(remat):
    """With the dense oracle as dispatch, whose products a jaxpr shows, and attention over the whole row."""
    model = runs.toy_model(max_seq_len=64, hidden_dim=64, gradient_checkpointing=remat)
    attention = dataclasses.replace(model.attention, implementation=AttentionImplementation.vanilla, sliding_window=64)
    model = dataclasses.replace(
        runs.replace_moe(
            model,
            dispatch=DispatchConfig(implementation=DispatchImplementation.reference),
            quantile_balancing=QuantileBalancingConfig(QuantileEstimator.topk),
        ),
        attention=attention,
    )
    config = runs.train_config(model, runs.EXPERT_PARALLEL, 2)
    mesh = abstract_mesh(with_mesh_sizes(runs.EXPERT_PARALLEL, {}))
    plan = plan_device(config, runs.VOCAB_SIZE, mesh)
    moe, tokens = model.moe, 2 * 64
    # the oracle computes every expert, not only the selected ones
    passes = 4 if remat else 3
    unselected = moe.num_experts - moe.num_experts_per_token
    extra = passes * model.num_layers * tokens * unselected * 2 * 3 * moe.latent_dim * moe.expert_dim
    counted = runs.dot_flops(runs.trace_train_step(config, runs.VOCAB_SIZE, mesh).jaxpr.jaxpr)
    assert counted == pytest.approx(plan.executed_flops + extra, rel=FLOPS_RTOL)


def test_gradient_of_a_scan_over_checkpointed_layers_keeps_no_second_copy_of_the_weights():
    seq_len = 23  # the size of no other axis
    model = runs.toy_model(num_layers=4, max_seq_len=seq_len)
    weights = eqx.filter_eval_shape(model.build, Axis(axes.VOCAB, runs.VOCAB_SIZE), key=jax.random.PRNGKey(0))
    arrays, static = eqx.partition((weights, abstract_batch(2, seq_len)), runs.is_struct)

    def backward(arrays):
        weights, batch = eqx.combine(arrays, static)
        return jax.vjp(lambda w: runs.loss(w, batch, key=jax.random.PRNGKey(0))[0].scalar(), weights)[1]

    jaxpr = jax.make_jaxpr(backward)(arrays).jaxpr
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    kept = [v for v in scan.outvars if any(v is other for other in jaxpr.outvars)]
    assert kept
    assert all(seq_len in v.aval.shape for v in kept)
