# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The PyTorch file of an export against the original implementation, whose checkpoints it loads."""

import numpy as np
import pytest
import torch

from folders import HF_CONFIGS, as_schema_1, golden, load, split_experts, weights, write_folder

LOGITS_ATOL = 2e-5


def logits(model, arrays, inputs="in/"):
    tokens = torch.from_numpy(arrays[f"{inputs}tokens"]).long()
    segment_ids = arrays.get(f"{inputs}segment_ids")
    if segment_ids is not None:
        segment_ids = torch.from_numpy(segment_ids).long()
    with torch.no_grad():
        return model(tokens, segment_ids=segment_ids).logits.numpy()


def assert_golden_logits(model, arrays, inputs="in/", outputs="out/"):
    segment_ids = arrays.get(f"{inputs}segment_ids")
    ours, theirs = logits(model, arrays, inputs), arrays[f"{outputs}logits"]
    valid = np.ones(theirs.shape[:2], bool) if segment_ids is None else segment_ids >= 0
    np.testing.assert_allclose(ours[valid], theirs[valid], rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_golden_loaded_with_transformers_gives_its_logits(name, tmp_path):
    arrays = golden(name)
    model = load(write_folder(tmp_path, weights(arrays), HF_CONFIGS[name]))
    if name == "hero_tiny_ep8":
        for rows in ("full", "padded"):
            assert_golden_logits(model, arrays, f"in/{rows}/", f"out/{rows}/")
    else:
        assert_golden_logits(model, arrays)


def test_golden_of_the_67b_family_as_schema_1_gives_its_logits(tmp_path):
    arrays = golden("snowball_like")
    assert_golden_logits(
        load(write_folder(tmp_path, *as_schema_1(weights(arrays), HF_CONFIGS["snowball_like"]))), arrays
    )


def test_golden_with_one_matrix_an_expert_gives_its_logits(tmp_path):
    arrays = golden("hero_tiny")
    model = load(write_folder(tmp_path, split_experts(weights(arrays)), HF_CONFIGS["hero_tiny"]))
    assert_golden_logits(model, arrays)


def test_router_bias_stays_fp32_in_a_bf16_model(tmp_path):
    arrays = golden("hero_tiny")
    folder = write_folder(tmp_path, weights(arrays), HF_CONFIGS["hero_tiny"])
    router = load(folder, dtype=torch.bfloat16).model.layers[1].mlp.router
    assert (router.weight.dtype, router.bias.dtype) == (torch.bfloat16, torch.float32)
    np.testing.assert_array_equal(router.bias.detach().numpy(), arrays["w/model.layers.1.mlp.router.bias"])


def test_saved_by_transformers_and_loaded_again_gives_the_same_logits(tmp_path):
    arrays = golden("hero_tiny")
    model = load(write_folder(tmp_path / "first", weights(arrays), HF_CONFIGS["hero_tiny"]))
    model.save_pretrained(tmp_path / "second")
    np.testing.assert_array_equal(logits(load(tmp_path / "second"), arrays), logits(model, arrays))
