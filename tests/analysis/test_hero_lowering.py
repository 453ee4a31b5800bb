# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The full 48-layer training step of the published model, lowered for 11 racks of 64 devices. Nothing is compiled."""

import re
import time

import abstract_runs as runs
import jmp
import pytest

from levanter_marin.analysis.train_state import abstract_mesh, with_mesh_sizes
from levanter_marin.models import presets

BATCH_SIZE = 11264


@pytest.mark.slow
def test_hero_train_step_lowers_for_704_devices_with_ragged_exchange_and_sharded_bank():
    mesh_config = with_mesh_sizes(runs.EXPERT_PARALLEL, {"data": 1, "expert": 64, "replica_dcn": 11})
    config = runs.train_config(presets.hero_535b_a23b(), mesh_config, BATCH_SIZE, mp=jmp.get_policy("p=f32,c=bf16"))
    mesh = abstract_mesh(mesh_config)
    start = time.perf_counter()
    traced = runs.trace_train_step(config, presets.PUBLISHED_VOCAB_SIZE, mesh)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    print(f"{len(text)} characters of StableHLO in {time.perf_counter() - start:.0f} s")

    assert "mhlo.num_partitions = 704" in text
    banks = re.findall(r"tensor<48x384x3072x3072xf32> \{[^}]*sdy\.sharding = #sdy\.sharding<@\w+, \[(.*?)\]>", text)
    # three weights, and two moments each
    assert len(banks) >= 9
    assert all(re.match(r'\{\}, \{"expert"\}, ', bank) for bank in banks)
    # a device multiplies with the 3 experts of one of its 2 chunks
    assert "tensor<3x3072x3072xbf16>" in text
    # 16 rows x 4096 tokens x 8 experts leave a device, ceil(1.15 x that / 2) arrive in a chunk
    operands = [line.split(" : ")[-1] for line in text.splitlines() if "@ragged_all_to_all" in line]
    there = "(tensor<524288x3072xbf16>, tensor<301466x3072xbf16>"
    back = "(tensor<301466x3072xbf16>, tensor<524288x3072xbf16>"
    counts = [sum(operand.startswith(way) for operand in operands) for way in (there, back)]
    # 4 layers of a group x 2 chunks x forward, recomputation and cotangents
    assert counts == [24, 24]
