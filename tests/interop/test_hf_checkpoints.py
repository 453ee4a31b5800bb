# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Whole checkpoints in the published formats: goldens in, round trips, damage, interruption."""

import dataclasses
import json
import os
import socket

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hf_cases import (
    HF_CONFIGS,
    ODD,
    ODD_VOCAB,
    as_schema_1,
    assert_equal_leaves,
    golden_folder,
    random_model,
    split_experts,
    write_folder,
)
from jax.sharding import AxisType, Mesh
from levanter.compat.hf_checkpoints import HFCheckpointConverter
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from levanter.models.snowball import SnowballConfig, SnowballLMHeadModel
from levanter.utils.jax_utils import local_cpu_mesh
from safetensors import safe_open
from tokenizers import Tokenizer, models

import golden_cases
from levanter_marin import axes
from levanter_marin.interop.converter import MarinMoeConverter
from levanter_marin.interop.hf_config import ArtifactSchema
from levanter_marin.interop.state_dict import ExpertLayout
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel
from levanter_marin.models.parameter_counts import total_parameters

LOGITS_ATOL = 2e-5


def load(folder, config=None, dtype=None) -> MarinMoeLMHeadModel:
    converter = MarinMoeConfig().hf_checkpoint_converter().replaced(reference_checkpoint=str(folder))
    with local_cpu_mesh():
        return converter.load_pretrained(MarinMoeLMHeadModel, config=config, dtype=dtype)


def save(model, folder, dtype=None, tokenizer=None, **options) -> MarinMoeConverter:
    shard_size = options.pop("max_shard_size", 10**9)
    converter = MarinMoeConverter(MarinMoeConfig, tokenizer=tokenizer, **options)
    with local_cpu_mesh():
        converter.save_pretrained(model, str(folder), dtype=dtype, max_shard_size=shard_size)
    return converter


def stored_names_and_dtypes(folder) -> dict[str, str]:
    out = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            out |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
    return out


@eqx.filter_jit
def logits_of(model, tokens, mask):
    return model(tokens, mask)


def assert_golden_logits(model, arrays, inputs="in/", outputs="out/"):
    example = golden_cases.example(arrays, inputs)
    logits = np.asarray(logits_of(model, example.tokens, example.attn_mask).array)
    segment_ids = arrays.get(f"{inputs}segment_ids")
    valid = np.ones(logits.shape[:2], bool) if segment_ids is None else segment_ids >= 0
    np.testing.assert_allclose(logits[valid], arrays[f"{outputs}logits"][valid], rtol=0, atol=LOGITS_ATOL)


# hero_tiny and snowball_like_nosegs are among the tests below
@pytest.mark.parametrize(
    "name",
    (
        "hero_tiny_sconv_v",
        "snowball_like",
        pytest.param("hero_tiny_padded", marks=pytest.mark.slow),
        pytest.param("hero_tiny_rope_split", marks=pytest.mark.slow),
        pytest.param("hero_tiny_nosegs", marks=pytest.mark.slow),
        pytest.param("hero_tiny_ep8", marks=pytest.mark.slow),
    ),
)
def test_golden_loaded_from_its_published_form_gives_its_logits(name, tmp_path):
    model = load(golden_folder(tmp_path, name))
    arrays = golden_cases.load(name).arrays
    if name == "hero_tiny_ep8":
        assert_golden_logits(model, arrays, "in/full/", "out/full/")
    else:
        assert_golden_logits(model, arrays)


def test_snowball_golden_as_schema_1_gives_its_logits_here_and_in_levanters_snowball(tmp_path):
    case = golden_cases.load("snowball_like_nosegs")
    tensors, config = as_schema_1(case.group("w/"), HF_CONFIGS[case.name])
    folder = write_folder(tmp_path / "schema1", tensors, config)
    ours = load(folder)
    assert_golden_logits(ours, case.arrays)

    converter = HFCheckpointConverter(
        SnowballConfig, str(folder), type(ours.config.to_hf_config(97)), tokenizer=_tokenizer()
    )
    mesh_axes = ("replica_dcn", "data", "context", "expert", "model")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), mesh_axes, axis_types=(AxisType.Explicit,) * 5)
    with hax.partitioning.set_mesh(mesh):
        theirs = converter.load_pretrained(SnowballLMHeadModel)
        logits = eqx.filter_jit(lambda m, tokens: m(tokens))(theirs, golden_cases.example(case.arrays).tokens)
    np.testing.assert_allclose(np.asarray(logits.array), case.arrays["out/logits"], rtol=0, atol=LOGITS_ATOL)

    # and what we write of it is what was read
    save(ours, tmp_path / "again")
    assert stored_names_and_dtypes(tmp_path / "again") == stored_names_and_dtypes(folder)
    assert json.loads((tmp_path / "again/config.json").read_text()).items() >= config.items()
    assert_equal_leaves(ours, load(tmp_path / "again"))


def _tokenizer():
    """Stands in where upstream asks for the size of a vocabulary."""
    return [None] * 97


def test_checkpoint_type_of_the_family_is_found_as_ours(tmp_path):
    folder = golden_folder(tmp_path, "hero_tiny")
    _save_tokenizer(folder, 97)
    converter = HFCheckpointConverter.from_hf(str(folder))
    assert converter.LevConfigClass is MarinMoeConfig
    with local_cpu_mesh():
        model = converter.load_pretrained(MarinMoeLMHeadModel)
    assert_golden_logits(model, golden_cases.load("hero_tiny").arrays)


def _save_tokenizer(folder, size):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"})
    )


def next_loss(model):
    Batch, Pos = Axis(axes.BATCH, 2), model.Pos
    tokens = hax.random.randint(jax.random.PRNGKey(1), (Batch, Pos), 0, model.Vocab.size)
    example = LmExample(tokens, hax.ones((Batch, Pos)), AttentionMask.causal())
    loss, _ = eqx.filter_jit(lambda m, e: m.compute_next_token_loss(e, key=jax.random.PRNGKey(0)))(model, example)
    return loss.item()


@pytest.mark.parametrize("scan_layers", (True, False))
def test_round_trip_native_to_hf_to_native_keeps_every_bit_and_the_next_loss(scan_layers, tmp_path):
    config = dataclasses.replace(ODD, scan_layers=scan_layers)
    model = random_model(config)
    layout = ExpertLayout.bank if scan_layers else ExpertLayout.per_expert
    plan = save(model, tmp_path / "hf", experts=layout, max_shard_size=50_000).plan(model, max_shard_size=50_000)

    assert len(plan.files) > 3
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == len(plan.files)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    count = total_parameters(config, ODD_VOCAB)
    assert index["metadata"]["total_parameters"] == count
    assert index["metadata"]["total_size"] == 4 * count
    back = load(tmp_path / "hf", config)
    assert_equal_leaves(model, back)
    if scan_layers:
        assert next_loss(back) == next_loss(model)


def test_round_trip_of_a_model_sharded_over_eight_devices_keeps_every_bit(tmp_path):
    model = random_model()
    mesh, mapping = Mesh(np.array(jax.devices()).reshape(8), ("data",)), {axes.EMBED: "data"}
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(mapping):
        sharded = hax.shard(model, mapping)
        MarinMoeConverter(MarinMoeConfig).save_pretrained(sharded, str(tmp_path / "hf"))
        converter = MarinMoeConverter(MarinMoeConfig, reference_checkpoint=str(tmp_path / "hf"))
        back = converter.load_pretrained(MarinMoeLMHeadModel, axis_mapping=mapping)
    weight = back.transformer.layers.stacked.self_attn.q_proj.weight
    assert weight.array.sharding.shard_shape(weight.array.shape)[-1] == ODD.hidden_dim // 8
    assert_equal_leaves(model, back)


@pytest.mark.parametrize("num_devices", (1, 8))
def test_export_without_a_mesh_writes_what_it_writes_under_one(num_devices, odd_folder, tmp_path):
    model = random_model()
    if num_devices > 1:
        with hax.partitioning.set_mesh(Mesh(np.array(jax.devices()), ("data",))):
            model = hax.shard(model, {axes.EMBED: "data"})
    MarinMoeConverter(MarinMoeConfig).save_pretrained(model, str(tmp_path / "hf"), max_shard_size=50_000)
    assert {file.name for file in odd_folder.iterdir()} == {file.name for file in (tmp_path / "hf").iterdir()}
    for file in odd_folder.iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes()


def test_export_in_bf16_keeps_router_biases_in_fp32(tmp_path):
    model = random_model()
    save(model, tmp_path / "hf", dtype=jnp.bfloat16)
    dtypes = stored_names_and_dtypes(tmp_path / "hf")
    assert {dtype for name, dtype in dtypes.items() if name.endswith("router.bias")} == {"F32"}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("router.bias")} == {"BF16"}
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    back = load(tmp_path / "hf", dtype=jnp.bfloat16)
    bias, kept = (m.transformer.layers.stacked.mlp.router.bias.value().array for m in (model, back))
    np.testing.assert_array_equal(bias, kept)
    weight, rounded = (m.lm_head.weight.array for m in (model, back))
    np.testing.assert_array_equal(weight.astype(jnp.bfloat16), rounded)


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd") / "hf"
    save(random_model(), folder, max_shard_size=50_000)
    return folder


@pytest.fixture
def copied(odd_folder, tmp_path):
    for file in odd_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _rewrite(folder, change):
    """The tensors of a folder, changed, in one file."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys()}
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    return write_folder(folder, change(tensors), json.loads((folder / "config.json").read_text()))


DELETED = "model.layers.2.mlp.latent_norm.weight"
TENSOR_DAMAGES = {
    "deleted": (
        lambda t: {name: value for name, value in t.items() if name != DELETED},
        f"missing tensors: {DELETED}",
    ),
    "added": (lambda t: t | {"extra": t[DELETED]}, "tensors that the model does not have: extra"),
    "shape": (
        lambda t: t | {DELETED: t[DELETED][1:]},
        rf"{DELETED} is \(23,\) where the config asks for \(24,\)",
    ),
    "expert": (
        lambda t: {n: v for n, v in split_experts(t).items() if n != "model.layers.1.mlp.experts.3.up_proj.weight"},
        "missing tensors: model.layers.1.mlp.experts.3.up_proj.weight",
    ),
}


@pytest.mark.parametrize(("change", "message"), TENSOR_DAMAGES.values(), ids=TENSOR_DAMAGES)
def test_load_names_a_tensor_that_is_deleted_added_or_of_another_shape(copied, change, message):
    with pytest.raises(ValueError, match=message):
        load(_rewrite(copied, change))


def _truncate(file):
    os.truncate(file, file.stat().st_size - 7)


def _corrupt(file):
    with file.open("r+b") as stream:
        stream.seek(9)
        stream.write(b"\xff\xff")


@pytest.mark.parametrize("damage", (_truncate, _corrupt, os.unlink))
def test_load_refuses_a_truncated_damaged_or_absent_file_by_name(copied, damage):
    file = sorted(copied.glob("*.safetensors"))[1]
    damage(file)
    with pytest.raises(ValueError, match=file.name):
        load(copied)


def test_load_refuses_a_config_that_computes_something_else(odd_folder):
    other = dataclasses.replace(ODD, attention=dataclasses.replace(ODD.attention, global_kv_heads=2))
    with pytest.raises(ValueError, match=r"global_kv_heads 2 \(checkpoint: 1\).*use_hf_model_config"):
        load(odd_folder, other)
    longer = dataclasses.replace(
        ODD, max_seq_len=64, attention=dataclasses.replace(ODD.attention, qk_mult=1.5, implementation="vanilla")
    )
    assert load(odd_folder, longer).config is longer


def test_interrupted_export_leaves_no_folder_that_looks_complete(tmp_path, monkeypatch):
    model = random_model()
    monkeypatch.setattr("levanter_marin.interop.converter.complete", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    monkeypatch.undo()
    save(model, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]

    # an earlier export survives the interruption of the next one
    monkeypatch.setattr("levanter_marin.interop.converter.save_hf_shards", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path / "hf", schema=ArtifactSchema.two)
    assert_equal_leaves(model, load(tmp_path / "hf"))


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_export_refuses_to_replace_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no Hugging Face checkpoint; name a new folder"):
        save(random_model(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_export_and_import_need_no_network_and_carry_tokenizer_and_code(tmp_path, monkeypatch):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(socket.socket, "connect", _no_network)
    _save_tokenizer(tmp_path / "tokenizer", ODD_VOCAB)
    model = random_model()
    save(model, tmp_path / "hf", tokenizer=str(tmp_path / "tokenizer"))
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"tokenizer.json", "modeling_marin_moe.py", "configuration_marin_moe.py", "config.json"} <= names
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["eos_token_id"] == 1
    converter = HFCheckpointConverter.from_hf(str(tmp_path / "hf"))
    assert len(converter.tokenizer) == ODD_VOCAB
    with local_cpu_mesh():
        assert_equal_leaves(model, converter.load_pretrained(MarinMoeLMHeadModel))


def _no_network(*args):
    raise AssertionError("a connection was made")
