# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`generate` with its cache against repeated full forward passes."""

from functools import cache

import pytest
import torch

from folders import HF_CONFIGS, golden, load, weights, write_folder

LOGITS_ATOL = 2e-5
NEW_TOKENS = 20  # well past the window of 8
PROMPTS = [[5, 9, 17], [3], [11, 2, 8, 60, 33, 12, 7], [96, 0, 1, 2], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]]


@pytest.fixture(scope="module", params=("hero_tiny_sconv_v", "snowball_like"))
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return load(write_folder(folder, weights(golden(request.param)), HF_CONFIGS[request.param]))


@cache
def greedy(model, prompt):
    """The oracle: no cache, the whole row again for every token."""
    row = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return row


def generate(model, prompt, **options):
    ids = torch.tensor(prompt)
    options.setdefault("attention_mask", torch.ones_like(ids))  # or every 0 would be taken for padding
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options).tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_generate_with_cache_continues_as_repeated_full_forwards_do(model, prompt):
    assert generate(model, [prompt]) == [greedy(model, tuple(prompt))]


def test_generate_of_a_left_padded_batch_continues_each_row_as_alone(model):
    longest = max(len(prompt) for prompt in PROMPTS)
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    rows = generate(model, padded, attention_mask=mask)
    assert [row[longest - len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)] == [
        greedy(model, tuple(prompt)) for prompt in PROMPTS
    ]


def test_generate_with_beams_gives_the_same_with_and_without_cache(model):
    options = {"num_beams": 3, "num_return_sequences": 3}
    assert generate(model, [PROMPTS[2]], **options) == generate(model, [PROMPTS[2]], use_cache=False, **options)


@pytest.mark.parametrize("cuts", ([1] * 20, [7, 1, 9, 3], [2, 18]))
def test_forward_in_pieces_gives_the_logits_of_the_whole_row(model, cuts):
    tokens = torch.randint(0, 97, (2, sum(cuts)), generator=torch.Generator().manual_seed(0))
    pieces, cache = [], None
    with torch.no_grad():
        whole = model(tokens).logits
        for piece in tokens.split(cuts, dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=LOGITS_ATOL)


def test_gradients_reach_every_weight_but_the_router_bias_and_unselected_experts(model):
    tokens = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(0))
    model(tokens, labels=tokens).loss.backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    model.zero_grad()
    assert all(name.endswith("router.bias") for name in without)


def test_a_cache_without_convolution_states_is_refused(model):
    with pytest.raises(ValueError, match="past_key_values is a list"):
        model(torch.tensor([[1, 2]]), past_key_values=[])
