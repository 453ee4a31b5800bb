# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The model against the original implementation: logits, losses, every gradient, every intermediate."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from jax.sharding import Mesh

import golden_cases
from golden_cases import HERO_VARIANTS, WHOLE_MODEL_CASES
from levanter_marin import axes
from levanter_marin.config import QuantileEstimator
from levanter_marin.layers.attention import AttentionContext
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.quantile_balancing import quantile_beta

LOGITS_ATOL = 2e-5
LOSS_ATOL = 2e-6
GRADIENT_RTOL = 1e-5  # Frobenius norm per leaf
BETA_ATOL = 2e-5
INTERMEDIATE_ATOL = 2e-5
STATISTIC_RTOL = 1e-5

Z_LOSS_WEIGHT = 1e-4


def _loss(model, example, z_loss_weight=Z_LOSS_WEIGHT):
    loss, metrics = model.compute_next_token_loss(example, key=jax.random.PRNGKey(0), logsumexp_weight=z_loss_weight)
    return loss.scalar(), metrics


@eqx.filter_jit
def _value_and_grad(model, example):
    return eqx.filter_value_and_grad(_loss, has_aux=True)(model, example)


def _with_estimator(config, estimator):
    balancing = dataclasses.replace(config.moe.quantile_balancing, estimator=estimator)
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, quantile_balancing=balancing))


def _valid(arrays, prefix="in/"):
    segment_ids = arrays.get(f"{prefix}segment_ids")
    return np.ones(arrays[f"{prefix}tokens"].shape, bool) if segment_ids is None else segment_ids >= 0


def _assert_gradients_match(model_gradient, expected):
    ours = golden_cases.state_dict(model_gradient)
    names = {name for name in expected if not name.endswith("router.bias")}
    assert set(ours) == names
    errors = {n: np.linalg.norm(ours[n] - expected[n]) / np.linalg.norm(expected[n]) for n in names}
    worst = max(errors, key=errors.get)
    assert errors[worst] < GRADIENT_RTOL, f"{worst}: {errors[worst]}"


def _next_router_bias(gradient) -> np.ndarray:
    return np.asarray(gradient.transformer.layers.stacked.mlp.router.bias.value().array)


@pytest.mark.parametrize("name", WHOLE_MODEL_CASES)
def test_model_golden_weights_give_every_gradient_and_the_next_router_bias(name):
    case = golden_cases.load(name)
    expected = golden_cases.gradients(name)
    model = golden_cases.build_model(case, golden_cases.model_config(case.config))
    (loss, metrics), gradient = _value_and_grad(model, golden_cases.example(case.arrays))
    assert abs(loss - case.arrays["out/loss_z1e-4"]) < LOSS_ATOL
    _assert_gradients_match(gradient, expected)
    np.testing.assert_allclose(
        _next_router_bias(gradient), case.arrays["out/router_bias_next.topk"], rtol=0, atol=BETA_ATOL
    )
    for metric, golden in (
        ("routing_entropy", "routing_entropy"),
        ("load_balancing_loss", "load_balancing_loss"),
        ("router_z_loss", "router_z_loss"),
    ):
        for i, value in enumerate(case.arrays[f"out/{golden}_per_layer"]):
            assert float(metrics[f"moe/{metric}/layer_{i:02d}"]) == pytest.approx(value, rel=STATISTIC_RTOL)


@pytest.mark.parametrize("name", ("hero_tiny", "hero_tiny_padded", "snowball_like"))
def test_model_histogram_golden_gives_the_next_router_bias_within_a_bin(name):
    case = golden_cases.load(name)
    config = _with_estimator(golden_cases.model_config(case.config), QuantileEstimator.histogram)
    (_, _), gradient = _value_and_grad(golden_cases.build_model(case, config), golden_cases.example(case.arrays))
    bins = config.moe.quantile_balancing.num_bins
    bin_width = (case.arrays["out/margin_max_per_layer"] - case.arrays["out/margin_min_per_layer"]) / bins
    error = np.abs(_next_router_bias(gradient) - case.arrays["out/router_bias_next.hist1000"])
    assert np.all(error <= bin_width[:, None] + BETA_ATOL)


def _forward(model, example):
    """Logits and losses as a user gets them, beside every intermediate."""
    per_token = model.compute_next_token_loss(example, reduction=None, logsumexp_weight=Z_LOSS_WEIGHT)
    logits = model(example.tokens, example.attn_mask)
    return logits, per_token, model.compute_next_token_loss(example), _trace(model, example)


def _trace(model, example) -> dict[str, NamedArray]:
    """Recompute a forward pass piece by piece, from the modules that the model itself is made of."""
    out = {}
    embed = model.embeddings
    context = AttentionContext.create(example.tokens.resolve_axis(axes.POSITION), example.attn_mask, None)
    out["embed_raw"] = embed.token_embeddings(example.tokens)
    out["embed_normed"] = embed.norm(out["embed_raw"])
    out["embed_out"] = x = embed(example.tokens)
    for i, (block, kind) in enumerate(
        zip(model.transformer.layers.unstacked(), model.config.layer_kinds, strict=True)
    ):
        moe = block.mlp
        p = f"block.{i}."
        out[p + "attn_in"] = attn_in = block.attention_input(x)
        out[p + "attn_out_before_sconv"] = attn_out = block.self_attn(attn_in, kind, context)
        out[p + "attn_branch"] = branch = (
            attn_out if block.sconv_attn is None else block.sconv_attn(attn_out, context.segment_ids)
        )
        out[p + "hidden_after_attn"] = after_attn = x + branch
        out[p + "mlp_in"] = mlp_in = block.mlp_input(after_attn)
        routing = moe.router(mlp_in)
        out[p + "router_logits"] = routing.logits
        out[p + "biased_logits"] = routing.logits + moe.router.bias.value()
        out[p + "selected_experts"] = routing.selected_experts
        out[p + "combine_weights"] = routing.combine_weights
        out[p + "qb_alpha"] = routing.qb_alpha
        out[p + "s_minus_alpha"] = routing.margins
        out[p + "routed_input"] = latent = moe.to_latent(mlp_in, model.Embed)
        routed, _ = dispatch_experts(
            latent,
            moe.experts,
            routing.selected_experts,
            routing.combine_weights,
            context.token_valid,
            moe.config.dispatch,
        )
        out[p + "routed_latent_out"] = routed
        out[p + "routed_out"] = moe_out = moe.from_latent(routed, model.Embed)
        for shared in block.shared_experts:
            moe_out = moe_out + shared(mlp_in)
        out[p + "mlp_out_before_sconv"] = moe_out
        out[p + "mlp_branch"] = moe_out if block.sconv_mlp is None else block.sconv_mlp(moe_out, context.segment_ids)
        x, statistics = block(x, kind, context)
        out[p + "out"] = x
        out[p + "expert_load"] = statistics.expert_load
        for estimator in (QuantileEstimator.topk, QuantileEstimator.histogram):
            balancing = dataclasses.replace(moe.config.quantile_balancing, estimator=estimator)
            k = moe.config.num_experts_per_token
            out[p + f"beta.{estimator}"] = quantile_beta(
                routing.margins, context.token_valid, num_experts_per_token=k, config=balancing
            )
    out["final_normed"] = normed = model.transformer.norm(x)
    out["final_hidden"] = model.transformer.final_gated_norm(normed)
    return out


@pytest.mark.parametrize("name", WHOLE_MODEL_CASES)
def test_model_golden_weights_give_logits_losses_every_intermediate_and_expert_choice(name):
    case = golden_cases.load(name)
    model = golden_cases.build_model(case, golden_cases.model_config(case.config))
    logits, per_token, loss_no_z, trace = eqx.filter_jit(_forward)(model, golden_cases.example(case.arrays))
    valid = _valid(case.arrays)
    np.testing.assert_allclose(logits.array[valid], case.arrays["out/logits"][valid], rtol=0, atol=LOGITS_ATOL)
    expected = case.arrays["out/loss_per_token_z1e-4"]
    np.testing.assert_allclose(per_token.array[valid], expected[valid], rtol=0, atol=LOGITS_ATOL)
    assert abs(loss_no_z.item() - case.arrays["out/loss_no_z"]) < LOSS_ATOL

    ours = {k: np.asarray(v.array) for k, v in trace.items()}

    for key, expected in case.group("mid/").items():
        value, mask = ours[key], valid
        if expected.shape[0] == valid.size:
            value, mask = value.reshape(expected.shape), valid.reshape(-1)
        if key.endswith("selected_experts"):
            np.testing.assert_array_equal(value[mask], expected[mask], err_msg=key)
        else:
            np.testing.assert_allclose(value[mask], expected[mask], rtol=0, atol=INTERMEDIATE_ATOL, err_msg=key)

    for i in range(model.config.num_layers):
        np.testing.assert_array_equal(ours[f"block.{i}.expert_load"], case.arrays["out/routing_counts_per_layer"][i])
        margins = ours[f"block.{i}.s_minus_alpha"][valid]
        assert margins.min() == pytest.approx(case.arrays["out/margin_min_per_layer"][i], abs=BETA_ATOL)
        assert margins.max() == pytest.approx(case.arrays["out/margin_max_per_layer"][i], abs=BETA_ATOL)
        bin_width = (margins.max() - margins.min()) / model.config.moe.quantile_balancing.num_bins
        for estimator, golden, atol in (("topk", "topk", BETA_ATOL), ("histogram", "hist1000", bin_width + BETA_ATOL)):
            np.testing.assert_allclose(
                ours[f"block.{i}.beta.{estimator}"],
                case.arrays[f"out/qb_beta_per_layer.{golden}"][i],
                rtol=0,
                atol=atol,
            )


def test_model_scan_and_rope_pairing_matter_to_the_goldens():
    # the goldens would not notice a model that ignored these two
    case, split = golden_cases.load("hero_tiny"), golden_cases.load("hero_tiny_rope_split")
    assert np.abs(case.arrays["out/logits"] - split.arrays["out/logits"]).max() > 100 * LOGITS_ATOL
    for name in HERO_VARIANTS:
        assert not np.array_equal(golden_cases.load(name).arrays["out/logits"], case.arrays["out/logits"])


@pytest.mark.parametrize("rows", (pytest.param("full", marks=pytest.mark.slow), "padded"))
@pytest.mark.parametrize("estimator", (QuantileEstimator.topk, QuantileEstimator.histogram))
def test_model_on_eight_data_parallel_devices_gives_the_golden(rows, estimator):
    case = golden_cases.load("hero_tiny_ep8")
    config = _with_estimator(golden_cases.model_config(case.config), estimator)
    model, example = golden_cases.build_model(case, config), golden_cases.example(case.arrays, f"in/{rows}/")
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("data",))
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping({axes.BATCH: "data"}):
        example = hax.shard(example)

        @hax.named_jit
        def step(model, example):
            logits = model(example.tokens, example.attn_mask)
            return logits, eqx.filter_value_and_grad(_loss, has_aux=True)(model, example)

        logits, ((loss, _), gradient) = step(model, example)
    valid = _valid(case.arrays, f"in/{rows}/")
    np.testing.assert_allclose(
        np.asarray(logits.array)[valid], case.arrays[f"out/{rows}/logits"][valid], rtol=0, atol=LOGITS_ATOL
    )
    assert abs(loss - case.arrays[f"out/{rows}/loss"]) < LOSS_ATOL
    beta = case.arrays[f"out/{rows}/qb_beta.{'topk' if estimator == 'topk' else 'hist'}.8shards"]
    bins = config.moe.quantile_balancing.num_bins
    width = (case.arrays[f"out/{rows}/margin_max"] - case.arrays[f"out/{rows}/margin_min"]) / bins
    atol = BETA_ATOL if estimator == QuantileEstimator.topk else width.reshape(-1, 1) + BETA_ATOL
    centred = beta.mean(-1, keepdims=True) - beta
    assert np.all(np.abs(_next_router_bias(gradient) - centred) <= atol)
    _assert_gradients_match(gradient, golden_cases.gradients("hero_tiny_ep8", f"g/{rows}/"))


@pytest.mark.parametrize("name", ("train_step_topk_fp32", "train_step_hist_fp32"))
def test_router_bias_over_three_steps_follows_the_golden(name):
    """The bias of step t + 1 comes from step t alone, so the parameters that step ran with are enough to check it."""
    case = golden_cases.load(name)
    config = golden_cases.model_config(case.config)
    after_first_step = golden_cases.gradients(name, "p1/")
    second = dataclasses.replace(case, arrays=case.arrays | {f"w/{k}": v for k, v in after_first_step.items()})
    bias = np.zeros((config.num_layers, config.moe.num_experts), np.float32)
    np.testing.assert_array_equal(case.arrays["out1/router_bias"], bias)

    for step, weights in ((1, case), (2, second)):
        model = golden_cases.build_model(weights, config, router_bias=bias)
        (loss, _), gradient = _value_and_grad(model, golden_cases.example(case.arrays, f"in{step}/"))
        assert abs(loss - case.arrays[f"out{step}/loss"]) < LOSS_ATOL
        bias = _next_router_bias(gradient)
        expected = case.arrays[f"out{step + 1}/router_bias"]
        atol = BETA_ATOL
        if config.moe.quantile_balancing.estimator is QuantileEstimator.histogram:
            atol += 2 * np.ptp(case.arrays[f"out{step}/qb_beta"]) / config.moe.quantile_balancing.num_bins
        np.testing.assert_allclose(bias, expected, rtol=0, atol=atol)
        np.testing.assert_allclose(bias.mean(-1), 0, atol=BETA_ATOL)
        bias = np.asarray(jnp.asarray(bias))
