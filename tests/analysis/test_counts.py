# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Parameter counts, FLOPs and initial norms against published figures, upstream's FLOP estimate and hand counts."""

import dataclasses
from dataclasses import dataclass

import ml_dtypes
import pytest
from levanter.utils.flop_utils import lm_flops_per_token

from levanter_marin.analysis.counts import (
    initial_norms,
    layer_schedule,
    published_flops_per_token,
    published_steps,
    published_training_flops,
    truncated_normal_std,
)
from levanter_marin.axes import LayerKind
from levanter_marin.config import AttentionConfig, ConvSite, MoeConfig, ShortConvConfig
from levanter_marin.models import presets
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.models.parameter_counts import (
    Family,
    active_parameters,
    flops_per_token,
    parameters_by_family,
    total_parameters,
    trainable_parameters,
)

COUNT_RTOL = 1e-12  # whole numbers, added up in fp64

VOCAB = presets.PUBLISHED_VOCAB_SIZE
SEQ = presets.PUBLISHED_SEQ_LEN


@dataclass(frozen=True)
class Rung:
    preset: str
    total: str
    active: int
    batch: int
    steps: int
    training_flops: str | None

    @property
    def model(self) -> MarinMoeConfig:
        return getattr(presets, self.preset)()


RUNGS = [
    Rung("d512", "597.6M", 20_840_448, 1024, 3_930, None),
    Rung("d768", "1.592B", 60_555_264, 1024, 11_420, "2.6497e+19"),
    Rung("d1024", "3.980B", 162_004_992, 2048, 15_276, "1.7261e+20"),
    Rung("d1536", "11.534B", 481_296_384, 6144, 15_128, "1.3813e+21"),
    Rung("d2048", "27.743B", 1_170_735_104, 11264, 20_072, "7.7418e+21"),
    Rung("hero_535b_a23b", "535.477B", 22_762_487_808, 11264, 390_251, "2.611e+24"),
]
over_rungs = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.preset)

TOY = MarinMoeConfig(
    max_seq_len=64,
    hidden_dim=32,
    num_layers=2,
    global_every=4,
    gated_norm_rank=8,
    attention=AttentionConfig(num_heads=4, head_dim=8, num_kv_heads=2, global_kv_heads=1, sliding_window=16),
    moe=MoeConfig(
        num_experts=8,
        num_experts_per_token=2,
        expert_dim=24,
        latent_dim=16,
        num_shared_experts=2,
        shared_expert_dim=20,
    ),
)


def test_total_parameters_of_published_rungs_match_printed_digits():
    assert total_parameters(presets.hero_535b_a23b(), VOCAB) == 535_477_106_688
    for rung in RUNGS:
        unit, scale = rung.total[-1], {"M": 1e6, "B": 1e9}[rung.total[-1]]
        decimals = len(rung.total[:-1].split(".")[1])
        assert f"{total_parameters(rung.model, VOCAB) / scale:.{decimals}f}{unit}" == rung.total


def test_trainable_parameters_of_hero_leave_out_only_the_router_biases():
    hero = presets.hero_535b_a23b()
    assert total_parameters(hero, VOCAB) - trainable_parameters(hero, VOCAB) == 48 * 384


@over_rungs
def test_active_parameters_of_published_rung_are_exact(rung):
    assert active_parameters(rung.model) == rung.active


@over_rungs
def test_published_steps_of_rung_are_exact(rung):
    assert published_steps(rung.model, rung.batch * SEQ) == rung.steps


@pytest.mark.parametrize("rung", [r for r in RUNGS if r.training_flops], ids=lambda rung: rung.preset)
def test_published_training_flops_of_rung_match_printed_digits(rung):
    flops = published_training_flops(rung.model, rung.steps * rung.batch * SEQ, SEQ)
    digits = len(rung.training_flops.split("e")[0]) - 2
    assert f"{flops:.{digits}e}" == rung.training_flops


@over_rungs
def test_published_flops_per_token_equal_upstream_estimate_with_latent_experts(rung):
    model, d, half = rung.model, rung.model.hidden_dim, rung.model.hidden_dim // 2
    expected = lm_flops_per_token(
        hidden_dim=d,
        intermediate_dim=half,
        num_layers=model.num_layers,
        num_kv_heads=model.attention.num_kv_heads,
        num_heads=model.attention.num_heads,
        seq_len=SEQ,
        vocab_size=VOCAB,
        glu=True,
        num_experts=384,
        num_shared_experts=2,
        num_experts_per_tok=8,
        sliding_window=2048,
        global_every=4,
        local_kv_heads=model.attention.local_kv_heads,
        global_kv_heads=model.attention.global_kv_heads,
    )
    expected -= 2 * d * VOCAB
    expected += model.num_layers * (2 * 3 * 8 * half * (half - d) + 2 * 2 * d * half)
    assert published_flops_per_token(model, SEQ) == pytest.approx(expected, rel=COUNT_RTOL)


def test_flops_per_token_of_toy_equal_hand_count():
    # Layer 0 is local (16 keys, 2 KV heads), layer 1 is last, hence global (64 keys, 1 KV head).
    projections = 2 * 2 * (32 * 32 + 32 * 32) + 2 * (2 * 32 * 16) + 2 * (2 * 32 * 8)
    # Scores and weighted values over heads x head_dim = 32, and Levanter's 3 per score for the softmax and mask.
    attention = (16 + 64) * (2 * 32 + 2 * 32 + 3 * 4)
    head_gates = 2 * 2 * 32 * 4
    convolutions = 2 * 4 * (16 + 8) + 2 * (2 * 2 * 4 * 32)
    routers = 2 * 2 * 32 * 8
    latent = 2 * 2 * 2 * 32 * 16
    routed = 2 * 2 * 2 * 3 * 16 * 24
    shared = 2 * 2 * 2 * 3 * 32 * 20
    gated_norms = (2 * 2 + 2) * 2 * 2 * 32 * 8
    lm_head = 2 * 32 * 100
    by_hand = (
        projections
        + attention
        + head_gates
        + convolutions
        + routers
        + latent
        + routed
        + shared
        + gated_norms
        + lm_head
    )
    assert flops_per_token(TOY, vocab_size=100, context_length=64) == by_hand == 66_432


def test_flops_per_token_with_window_beyond_row_count_every_key_once():
    wide = dataclasses.replace(TOY, attention=dataclasses.replace(TOY.attention, sliding_window=64))
    difference = flops_per_token(wide, 100, 64) - flops_per_token(TOY, 100, 64)
    assert difference == pytest.approx((64 - 16) * (2 * 32 + 2 * 32 + 3 * 4), rel=COUNT_RTOL)


def test_flops_per_token_with_heads_wider_than_hidden_count_the_real_projections():
    wide = dataclasses.replace(TOY, attention=dataclasses.replace(TOY.attention, head_dim=16))
    # Twice the head width doubles projections, the attention products and the key convolutions.
    projections = 2 * 2 * (32 * 32 + 32 * 32) + 2 * (2 * 32 * 16) + 2 * (2 * 32 * 8)
    products = (16 + 64) * (2 * 32 + 2 * 32)
    key_convolutions = 2 * 4 * (16 + 8)
    difference = flops_per_token(wide, 100, 64) - flops_per_token(TOY, 100, 64)
    assert difference == pytest.approx(projections + products + key_convolutions, rel=COUNT_RTOL)


def test_parameters_by_family_of_toy_equal_hand_count():
    assert parameters_by_family(TOY, vocab_size=100) == {
        Family.EMBEDDING: 100 * 32,
        Family.LM_HEAD: 32 * 100,
        Family.NORMS: 2 * 32 + 2 * (2 * 32 + 16),
        Family.GATED_NORMS: (2 + 2 * 2) * 2 * 32 * 8,
        Family.ATTENTION: 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32),
        Family.ATTN_GATE: 2 * 32 * 4,
        Family.SHORT_CONV: 2 * 4 * (16 + 32 + 32),
        Family.ROUTER: 2 * 32 * 8,
        Family.LATENT: 2 * 2 * 32 * 16,
        Family.EXPERTS: 2 * 8 * 3 * 16 * 24,
        Family.SHARED_EXPERTS: 2 * 2 * 3 * 32 * 20,
        Family.ROUTER_BIAS: 2 * 8,
    }


def test_parameters_by_family_without_components_count_zero_for_them():
    bare = dataclasses.replace(
        TOY,
        gated_norm_rank=None,
        attention=dataclasses.replace(TOY.attention, head_gate=False),
        short_conv=ShortConvConfig(sites=(ConvSite.v,)),
        moe=dataclasses.replace(TOY.moe, latent_dim=None, num_shared_experts=0),
    )
    counts = parameters_by_family(bare, vocab_size=100)
    absent = (Family.GATED_NORMS, Family.ATTN_GATE, Family.LATENT, Family.SHARED_EXPERTS)
    assert [counts[family] for family in absent] == [0, 0, 0, 0]
    assert counts[Family.EXPERTS] == 2 * 8 * 3 * 32 * 24
    assert counts[Family.SHORT_CONV] == 2 * 4 * 16
    assert counts[Family.NORMS] == 2 * 32 + 2 * 2 * 32


def test_truncated_normal_std_at_three_matches_published_constant():
    assert truncated_normal_std() == pytest.approx(0.98658, abs=5e-6)


def test_initial_norms_of_hero_match_published_bf16_values():
    norms = initial_norms(presets.hero_535b_a23b(), VOCAB)
    published = {
        "w_q": 268,
        "w_k": 134,
        "experts.w_gate": 2624,
        "experts.w_down": 2624,
        "latent.w_down": 189,
        "latent.w_up": 189,
        "shared_experts.0.w_up": 189,
        "attn_gated_norm.w_down": 38.75,
        "mlp_gated_norm.w_up": 38.75,
        "lm_head": 177,
        "embed_gated_norm.w_down": 5.594,
        "final_gated_norm.w_up": 5.594,
    }
    # The published list was logged in bf16: 38.75 and 5.59375 are 38.67 and 5.581 rounded to 8 bits.
    rounded = {name: float(ml_dtypes.bfloat16(norms[name])) for name in published}
    assert rounded == pytest.approx(published, rel=1e-4)


def test_layer_schedule_of_d2048_ends_with_a_global_layer_off_the_stride():
    rows = layer_schedule(presets.d2048())
    global_layers = [row.index for row in rows if row.kind is LayerKind.GLOBAL]
    assert global_layers == [3, 7, 11, 15, 19, 21]
    assert {(row.window, row.kv_heads, row.rope_dim) for row in rows if row.index in global_layers} == {(None, 2, 0)}
    assert {(r.window, r.kv_heads, r.rope_dim) for r in rows if r.index not in global_layers} == {(2048, 4, 64)}
