# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What a mesh has to divide: told in one line before anything is compiled, and true of the presets."""

from pathlib import Path

import draccus
import pytest
import yaml
from levanter.utils.mesh import MeshConfig

from levanter_marin.cli.errors import UserError
from levanter_marin.cli.preflight import check_mesh
from levanter_marin.config import AttentionConfig, MoeConfig
from levanter_marin.models.marin_moe import MarinMoeConfig

CONFIG = Path(__file__).parents[2] / "config"
PRESETS = {"one_device": (1, 1), "data2_expert4": (8, 1), "nvl72_rack": (64, 1), "nvl72_11_racks": (704, 11)}


def _preset(name: str) -> MeshConfig:
    raw = yaml.safe_load((CONFIG / "mesh" / f"{name}.yaml").read_text(encoding="utf-8"))
    return draccus.decode(MeshConfig, raw["trainer"]["mesh"])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("config", ["hero_535b_a23b", "d1024"])
def test_mesh_preset_fits_its_devices_and_published_shapes(preset, config):
    raw = yaml.safe_load((CONFIG / f"{config}.yaml").read_text(encoding="utf-8"))
    raw["model"].pop("type")
    model = draccus.decode(MarinMoeConfig, raw["model"])
    num_devices, num_slices = PRESETS[preset]
    batch = 11264 if num_slices > 1 else raw["trainer"]["train_batch_size"]
    check_mesh(_preset(preset), model, batch, num_devices=num_devices, num_slices=num_slices)
    within, between = _preset(preset).axis_shapes(num_devices, num_slices)
    assert within["expert"] * within["data"] * between["replica_dcn"] == num_devices


EXPERT_4 = {
    "axes": {"data": 2, "expert": 4},
    "shared_mapping": {"experts": "expert"},
    "compute_mapping": {"batch": ["data", "expert"]},
}


@pytest.mark.parametrize(
    ("mesh", "model", "batch", "line"),
    [
        (
            EXPERT_4,
            {"moe": MoeConfig(num_experts=6, num_experts_per_token=2)},
            8,
            "model.moe.num_experts=6 does not divide over the 4 devices of the mesh axes expert; "
            "set it to 8, or those axes to 2",
        ),
        (
            EXPERT_4,
            {},
            62,
            "trainer.train_batch_size=62 does not divide over the 8 devices of the mesh axes data, expert; "
            "set it to 64, or those axes to 2",
        ),
        (
            {"axes": {"data": 1, "model": 8}},
            {"attention": AttentionConfig(num_heads=12, num_kv_heads=2)},
            8,
            "model.attention.num_heads=12 does not divide over the 8 devices of the mesh axes model; set it to 16, or "
            "those axes to 4",
        ),
        (
            {"axes": {"data": 1, "model": 8}},
            {"attention": AttentionConfig(num_heads=8), "moe": MoeConfig(expert_dim=60)},
            8,
            "model.moe.expert_dim=60 does not divide over the 8 devices",
        ),
        (
            {**EXPERT_4, "compute_mapping": {"batch": ["data"]}},
            {},
            8,
            "trainer.mesh spreads experts over `expert` of size 4 but the batch over ['data'], so every token "
            "would be sent 4 times; set trainer.mesh.compute_mapping.batch to ['data', 'expert']",
        ),
        ({"axes": {"data": 3, "expert": 4}}, {}, 8, "does not fit 8 devices"),
    ],
)
def test_mesh_that_does_not_divide_is_refused_in_one_line(mesh, model, batch, line):
    with pytest.raises(UserError) as refusal:
        check_mesh(draccus.decode(MeshConfig, mesh), MarinMoeConfig(**model), batch, num_devices=8)
    assert line in str(refusal.value)
