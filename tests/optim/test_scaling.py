# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The scaling rule against the published hero run and ladder, to all printed digits."""

import pytest

from levanter_marin.optim.scaling import ScaleFrom, scaled_hyperparameters

HERO_RTOL = 1e-14

SEQ_LEN = 4096
TOKENS_PER_ACTIVE_PARAMETER = 791

# width, active parameters, batch, and as printed: steps, MuonH lr, Adam lr, beta2, eps
LADDER = (
    (512, 20_840_448, 1024, 3_930, "0.026317", "0.0060731", "0.96849", "6.07e-16"),
    (768, 60_555_264, 1024, 11_420, "0.015819", "0.0036505", "0.96849", "1.03e-15"),
    (1024, 162_004_992, 2048, 15_276, "0.014411", "0.0033257", "0.95", "1.20e-15"),
    (1536, 481_296_384, 6144, 15_128, "0.014889", "0.0034360", "0.95", "1.19e-15"),
    (2048, 1_170_735_104, 11264, 20_072, "0.013422", "0.0030973", "0.95", "1.37e-15"),
    (6144, 22_762_487_808, 11264, 390_251, "0.0032905", "0.00075934", "0.95", "6.04e-15"),
)


def as_printed(value: float, printed: str) -> str:
    """`value` with the decimals of `printed`."""
    mantissa = printed.partition("e")[0]
    decimals = len(mantissa.partition(".")[2])
    return f"{value:.{decimals}{'e' if 'e' in printed else 'f'}}"


@pytest.mark.parametrize(("hidden_dim", "active", "batch", "steps", "muonh", "adam", "beta2", "eps"), LADDER)
def test_scaled_hyperparameters_of_every_rung_are_the_published(
    hidden_dim, active, batch, steps, muonh, adam, beta2, eps
):
    tokens_per_batch = batch * SEQ_LEN
    num_steps = round(TOKENS_PER_ACTIVE_PARAMETER * active / tokens_per_batch)
    assert num_steps == steps
    ours = scaled_hyperparameters(ScaleFrom(num_steps * tokens_per_batch, tokens_per_batch, hidden_dim))
    for value, printed in (
        (ours.learning_rate, muonh),
        (ours.adam_lr, adam),
        (ours.beta2, beta2),
        (ours.epsilon, eps),
    ):
        assert as_printed(value, printed) == printed


def test_scaled_hyperparameters_of_the_hero_equal_the_run():
    ours = scaled_hyperparameters(ScaleFrom(390_251 * 46_137_344, 46_137_344, 6144))
    assert ours.learning_rate == pytest.approx(0.003290470163258143, rel=HERO_RTOL)
    assert ours.adam_lr == pytest.approx(0.0007593392684441868, rel=HERO_RTOL)
    assert ours.epsilon == pytest.approx(6.044604247506697e-15, rel=HERO_RTOL)
    assert ours.beta2 == 0.95


def test_scaled_hyperparameters_of_a_small_run_are_capped():
    ours = scaled_hyperparameters(ScaleFrom(4 * 2048, 2048, 8))
    assert ours.learning_rate == ours.adam_lr == 0.05
    assert ours.beta2 == 0.9999


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": 1e9, "tokens_per_batch": 1e6}, "hidden_dim=0"),
        ({"tokens": -1, "tokens_per_batch": 1e6, "hidden_dim": 8}, "tokens=-1"),
        ({"tokens": 1e6, "tokens_per_batch": 1e9, "hidden_dim": 8}, r"tokens=1e\+06 is below .*=1e\+09"),
    ],
)
def test_scaled_hyperparameters_of_impossible_sizes_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        scaled_hyperparameters(ScaleFrom(**kwargs))
