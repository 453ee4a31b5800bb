# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""All-to-all dispatch on meshes with an `expert` axis: against the dense oracle, the simulation and the goldens."""

import dataclasses
import json
import re
from fractions import Fraction

import dispatch_cases as cases
import exchange_simulation as simulation
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, PartitionSpec

import golden_cases
from levanter_marin.config import DispatchConfig, DispatchImplementation
from levanter_marin.moe.dispatch import ragged_all_to_all as ragged_module
from levanter_marin.moe.dispatch import transport
from levanter_marin.moe.dispatch.api import best_implementation, dispatch_experts
from levanter_marin.moe.dispatch.plan import Transfer
from levanter_marin.moe.experts import ExpertBank

# Relative to the largest element of the compared array.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
GOLDEN_TOLERANCE = 1e-5  # Frobenius, relative

REFERENCE = DispatchImplementation.reference
RAGGED, PADDED = DispatchImplementation.ragged_all_to_all, DispatchImplementation.padded_all_to_all
MESHES = [
    "expert8",
    "data2_expert2_model2",
    pytest.param("data8_expert1", marks=pytest.mark.slow),
    pytest.param("data4_expert2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", MESHES)
def test_ragged_all_to_all_on_every_mesh_equals_reference(mesh):
    """One routing spreads tokens, one gives a single shard everything, in one nobody has anything to send."""
    for routing in ("padding", "all_to_two_experts", "nothing_valid"):
        case = cases.case(routing)
        actual = cases.value_and_gradients(RAGGED, case, mesh)
        cases.assert_close(actual, cases.value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32])


@pytest.mark.slow
def test_padded_all_to_all_with_tensor_parallel_experts_equals_reference():
    case = cases.case("padding")
    actual = cases.value_and_gradients(PADDED, case, "data2_expert2_model2")
    cases.assert_close(actual, cases.value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32])


@pytest.mark.slow
def test_ragged_all_to_all_bfloat16_with_tensor_parallel_experts_equals_reference():
    case = cases.case("padding", jnp.bfloat16)
    actual = cases.value_and_gradients(RAGGED, case, "data2_expert2_model2")
    cases.assert_close(actual, cases.value_and_gradients(REFERENCE, case), TOLERANCE[jnp.bfloat16])


def _accepted_by_group(selected, valid, factor, data, expert):
    """The simulation for every group of `expert` devices, in the order in which the mesh shards the batch."""
    tokens = selected.shape[0] * selected.shape[1] // (data * expert)
    selected = selected.reshape(data, expert, tokens, -1)
    valid = valid.reshape(data, expert, tokens)
    groups = [simulation.accepted_assignments(s, v, 8, 2, factor) for s, v in zip(selected, valid, strict=True)]
    return np.stack(groups)


def _assert_drops_the_rest(implementation, factor, case, accepted, *, at_sender):
    """The backend on data 2 x expert 4 against the oracle with the weights of all but `accepted` zero."""
    x, bank, selected, weights, token_valid, d_out = case
    accepted = hax.named(accepted.reshape(selected.array.shape), selected.axes)
    *actual, counts = cases.value_and_gradients(implementation, case, "data2_expert4", capacity_factor=factor)
    kept_weights = hax.where(accepted, weights, 0.0)
    *expected, _ = cases.value_and_gradients(REFERENCE, (x, bank, selected, kept_weights, token_valid, d_out))
    expected[3] = hax.where(accepted, expected[3], 0.0)
    cases.assert_close(tuple(actual), tuple(expected), TOLERANCE[jnp.float32])
    kept, valid = int(accepted.array.sum()), int(token_valid.array.sum()) * 2
    assert kept < valid
    dropped = valid - kept
    assert [int(c.array) for c in counts] == [kept, *((dropped, 0) if at_sender else (0, dropped)), 128 - valid]


@pytest.mark.parametrize("factor", [1.0])
@pytest.mark.parametrize("routing", ["full", "padding", "all_to_two_experts"])
def test_ragged_all_to_all_at_capacity_equals_reference_without_the_dropped(routing, factor):
    case = cases.case(routing)
    _, _, selected, _, token_valid, _ = case
    accepted = _accepted_by_group(np.asarray(selected.array), np.asarray(token_valid.array), Fraction(factor), 2, 4)
    _assert_drops_the_rest(RAGGED, factor, case, accepted, at_sender=False)


@pytest.mark.parametrize("routing", ["padding", "all_to_two_experts"])
def test_padded_all_to_all_at_capacity_equals_reference_without_the_dropped(routing):
    case = cases.case(routing)
    _, _, selected, _, token_valid, _ = case
    # 8 tokens and 16 assignments a device: ceil(16 / 4) rows for each of 4 receivers, experts in order
    accepted = np.zeros((8, 16), bool)
    for device, (experts, valid) in enumerate(
        zip(np.asarray(selected.array).reshape(8, 16), np.asarray(token_valid.array), strict=True)
    ):
        for receiver in range(4):
            mine = [a for e in (0, 1) for a in range(16) if valid[a // 2] and experts[a] == 2 * receiver + e]
            accepted[device, mine[:4]] = True
    _assert_drops_the_rest(PADDED, 1.0, case, accepted, at_sender=True)


def test_ragged_all_to_all_nan_in_unwritten_buffers_changes_no_bit(monkeypatch):
    case = cases.case("padding")  # less than half of the rows of every buffer are used
    clean = cases.value_and_gradients(RAGGED, case, "data2_expert4")

    def poisoned(rows, like):
        return jnp.full((rows, like.shape[1]), jnp.nan, like.dtype)

    def exchange_with_poison(operand, output, transfer, axis_name):
        # the cotangent of a buffer that nobody reads is zero, where another implementation may leave anything
        output = jnp.where(jnp.any(output != 0, axis=1, keepdims=True), output, jnp.nan)
        return exchange(operand, output, transfer, axis_name)

    exchange = transport.ragged_all_to_all
    monkeypatch.setattr(transport, "ragged_all_to_all", exchange_with_poison)
    monkeypatch.setattr(ragged_module, "unwritten_rows", poisoned)
    config = DispatchConfig(implementation=RAGGED, capacity_factor=None)
    with cases.on_mesh("data2_expert4"):
        dirty = cases.compiled.__wrapped__(config, "data2_expert4")(*case)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.all(np.isfinite(a)) and np.array_equal(a, b)


@pytest.mark.parametrize("largest", [5, 16], ids=["fitting into blocks", "one piece too large for a block"])
def test_ragged_all_to_all_emulation_equals_simulation(largest):
    """Pieces of random sizes at random places, empty ones among them, some at one offset."""
    shards, pieces, rows_in, rows_out = 4, 3, 40, 90
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 5, (shards, shards, pieces)) * (rng.random((shards, shards, pieces)) < 0.6)
    sizes[2, 1] = [0, largest, 0]
    starts = np.stack([rng.permutation(rows_in - largest)[: shards * pieces] for _ in range(shards)])
    targets = np.zeros_like(sizes)
    for receiver in range(shards):
        at = 0
        for sender, piece in rng.permutation(list(np.ndindex(shards, pieces))):
            targets[sender, receiver, piece] = at
            at += sizes[sender, receiver, piece] + rng.integers(0, 2)
        assert at <= rows_out
    sent, received = sizes.reshape(shards, -1), sizes.transpose(1, 0, 2).reshape(shards, -1)
    transfers = Transfer(*(np.int32(a.reshape(shards, -1)) for a in (starts, sent, targets, received)))
    operand = rng.normal(size=(shards, rows_in, 2)).astype(np.float32)
    output = rng.normal(size=(shards, rows_out, 2)).astype(np.float32)
    expected = simulation.ragged_all_to_all(operand, output, list(zip(*transfers, strict=True)))

    mesh = jax.make_mesh((shards,), ("expert",), devices=jax.devices()[:shards], axis_types=(AxisType.Auto,))
    spec = PartitionSpec("expert")

    def body(operand, output, *transfer):
        transfer = Transfer(*(a[0] for a in transfer))
        return transport.ragged_all_to_all(operand[0], output[0], transfer, "expert")[None]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    np.testing.assert_array_equal(run(operand, output, *transfers), np.stack(expected))


def _bytes_exchanged(latent: int) -> int:
    """Of the operands of every ragged all-to-all in the program for GPUs, forward and backward."""
    case = cases.case("full")
    bank = cases.make_bank(8, latent=latent)
    Latent = Axis("latent", latent)
    x, d_out = (hax.zeros((*a.axes[:2], Latent)) for a in (case[0], case[5]))
    config = DispatchConfig(implementation=RAGGED, capacity_factor=1.0)
    with cases.on_mesh("data2_expert4"):
        run = cases.compiled.__wrapped__(config, "data2_expert4")
        lowered = (
            jax.jit(lambda *args: run(*args)).trace(x, bank, *case[2:5], d_out).lower(lowering_platforms=("cuda",))
        )
    operands = re.findall(r"custom_call @ragged_all_to_all\(.*?: \(tensor<(\d+)x(\d+)xf32>", lowered.as_text())
    assert len(operands) == 8  # two chunks, there and back, forward and backward
    return sum(int(rows) * int(width) * 4 for rows, width in operands)


def test_ragged_all_to_all_latent_of_half_the_width_exchanges_half_the_bytes():
    assert _bytes_exchanged(16) / _bytes_exchanged(32) == 0.5


def test_best_implementation_takes_all_to_all_only_where_experts_are_spread():
    chosen = {}
    for mesh in cases.MESHES:
        with cases.on_mesh(mesh):
            chosen[mesh] = best_implementation()
    spread = {"expert4", "expert8", "data2_expert4", "data4_expert2", "data2_expert2_model2"}
    assert chosen == {mesh: RAGGED if mesh in spread else DispatchImplementation.local for mesh in cases.MESHES}


@pytest.mark.parametrize("implementation", [RAGGED, PADDED])
@pytest.mark.parametrize(
    ("mesh", "reason"),
    [("no_mesh", "there is no mesh"), ("data8", "no axis `expert`; set trainer.mesh.axes.expert")],
)
def test_named_all_to_all_that_cannot_run_names_the_reason(implementation, mesh, reason):
    with pytest.raises(ValueError, match=reason):
        cases.value_and_gradients(implementation, cases.case("full"), mesh)


@pytest.mark.parametrize(
    ("routing", "mapping", "reason"),
    [
        ("full", {"batch": "data", "experts": "expert"}, "each would be sent 4 times; add expert to"),
        ("full", {"batch": ("data", "expert"), "experts": ("expert", "data")}, "`experts` is mapped to .*; set"),
        (
            "six_experts",
            {"batch": ("data", "expert"), "experts": "expert"},
            "num_experts=6 .* 4 devices .* axis to 2 or num_experts to 8",
        ),
        (
            "62_tokens_of_8_experts",
            {"batch": "data", "position": "expert", "experts": "expert"},
            "position of size 31 .* 4 devices .* multiple of 4",
        ),
    ],
)
def test_all_to_all_that_does_not_fit_the_mesh_is_refused(routing, mapping, reason):
    x, bank, selected, weights, *_ = cases.case(routing)
    implementation = RAGGED if mapping["experts"] != "expert" else DispatchImplementation.auto
    config = DispatchConfig(implementation=implementation)
    with cases.on_mesh("data2_expert4"), hax.axis_mapping(mapping), pytest.raises(ValueError, match=reason):
        dispatch_experts(x, bank, selected, weights, None, config)


GOLDEN = "ep_moe_layer"
DROPLESS_BACKENDS = (
    "ring",
    "ring_gather_combine",
    "ring_filtered",
    "fixed_all_to_all",
    "fixed_pooled_wave_all_to_all",
)


def _golden():
    path = golden_cases.FULL / f"{GOLDEN}.npz"
    if not path.exists():
        pytest.skip(f"the numbers of the original's dispatch are only in the full goldens, looked for at {path}")
    notes = json.loads(path.with_suffix(".json").read_text())
    return dict(np.load(path)), notes


def _golden_run(arrays, valid_name, config):
    tokens, top = arrays["in/selected_experts"].shape
    Tokens, Top, Latent = Axis("batch", tokens), Axis("top_experts", top), Axis("latent", arrays["in/x"].shape[1])
    E, _, F = arrays["in/w_gate"].shape
    bank = cases.make_bank(E, latent=Latent.size, width=F, top=top)
    bank = ExpertBank(
        *(
            dataclasses.replace(linear, weight=hax.named(jnp.asarray(arrays[f"in/w_{name}"]), linear.weight.axes))
            for name, linear in (("gate", bank.gate_proj), ("up", bank.up_proj), ("down", bank.down_proj))
        )
    )
    case = (
        hax.named(jnp.asarray(arrays["in/x"]), (Tokens, Latent)),
        bank,
        hax.named(jnp.asarray(arrays["in/selected_experts"]), (Tokens, Top)),
        hax.named(jnp.asarray(arrays["in/combine_weights"]), (Tokens, Top)),
        hax.named(jnp.asarray(arrays[f"in/token_valid_{valid_name}"]), (Tokens,)),
        hax.named(jnp.asarray(arrays["in/cotangent"]), (Tokens, Latent)),
    )
    out, d_x, d_bank, d_weights, counts = cases.value_and_gradients(RAGGED, case, "expert4", **config)
    named = {"out": out, "d_x": d_x, "d_combine_weights": d_weights}
    named |= {f"d_w_{p}": getattr(d_bank, f"{p}_proj").weight for p in ("gate", "up", "down")}
    return {name: np.asarray(a.array) for name, a in named.items()}, [int(c.array) for c in counts]


def _assert_golden(actual, arrays, prefix):
    for name, array in actual.items():
        expected = arrays[f"{prefix}/{name}"]
        assert np.linalg.norm(array - expected) <= GOLDEN_TOLERANCE * np.linalg.norm(expected), f"{prefix}/{name}"


@pytest.mark.parametrize("factor", [pytest.param(8.0, marks=pytest.mark.slow), 1.15, 1.0])
def test_ragged_all_to_all_equals_the_original(factor):
    """Outputs, gradients, drops; the accepted set is where the gradient of a combine weight is not zero."""
    arrays, _ = _golden()
    for valid in ("all", "pad"):
        actual, (kept, sender, receiver, padding) = _golden_run(arrays, valid, {"capacity_factor": factor})
        prefix = f"ragged_all_to_all/cap{factor}/{valid}"
        _assert_golden(actual, arrays, prefix)
        drops = arrays[f"{prefix}/drops_sender_receiver_padding"]
        assert sender + receiver == drops[0] + drops[1]
        assert kept + sender + receiver + padding == arrays["in/selected_experts"].size
        np.testing.assert_array_equal(actual["d_combine_weights"] != 0, arrays[f"{prefix}/accepted"])


@pytest.mark.slow
def test_ragged_all_to_all_dropless_equals_every_other_transport_of_the_original():
    arrays, _ = _golden()
    for valid in ("all", "pad"):
        actual, (_, sender, receiver, _) = _golden_run(arrays, valid, {"capacity_factor": None})
        assert sender == receiver == 0
        for backend in DROPLESS_BACKENDS:
            _assert_golden(actual, arrays, f"{backend}/cap8.0/{valid}")
