# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter's checkpoint of a model as published tensors, read when they are asked for and no sooner."""

from collections.abc import Sequence
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import tensorstore
from haliax import NamedArray
from haliax.util import is_named_array
from levanter import tensorstore_serialization
from levanter.checkpoint_manifest import read_manifest
from levanter.tensorstore_serialization import ARRAY_DRIVER, KVSTORE_DRIVER
from levanter.utils.jax_utils import leaf_key_paths
from rigging.filesystem.cross_region import record_transfer

from levanter_marin.interop.export_plan import StoredLeaf
from levanter_marin.interop.state_dict import flattened, get_path, shape_problems, tensor_sources

# Chunks, of up to 512 MiB, that TensorStore holds at once.
_CHUNKS_IN_FLIGHT = 4


class _StoredArrays(NamedTuple):
    """A leaf of the model on disk: the model's own tree at one path, with paths in the checkpoint for arrays."""

    shapes: Any
    paths: Any


class NativeCheckpoint:
    """The model in a checkpoint folder `step-N`, scanned or unrolled, on local or remote storage.

    Opening it reads the list of arrays alone.
    """

    def __init__(self, folder: str, model: Any, subpath: str = "model"):
        """Compares the arrays of a checkpoint with those that a model needs.

        Args:
            folder: with Levanter's manifest.json.
            model: the `MarinMoeLMHeadModel` as shapes.
            subpath: of the model within the checkpoint.

        Raises:
            ValueError: it is in no format that can be read here, or an array is missing, unknown or of another shape;
                the message names it, with both shapes.
        """
        manifest = read_manifest(folder)
        if manifest is None or (manifest.array_driver, manifest.kvstore_driver) != (ARRAY_DRIVER, KVSTORE_DRIVER):
            raise ValueError(f"{folder} has no manifest.json that lists {ARRAY_DRIVER} arrays in {KVSTORE_DRIVER}")
        self._folder = folder
        # Not upstream's context, whose cache of 10 GB would hold what was read before.
        limits = {name: {"limit": _CHUNKS_IN_FLIGHT} for name in tensorstore_serialization._CONCURRENCY_RESOURCES}
        self._context = tensorstore.Context(limits)
        self._sources = tensor_sources(model)
        self._stored: dict[str, _StoredArrays] = {}
        for source in self._sources.values():
            shapes = get_path(model, source.path)
            keys = leaf_key_paths(shapes, f"{subpath}.{source.path}", is_leaf=is_named_array)
            paths = jax.tree.map(lambda key: key.replace(".", "/"), keys)
            self._stored[source.path] = _StoredArrays(shapes, paths)
        wanted: dict[str, tuple[int, ...]] = {}
        for stored in self._stored.values():
            jax.tree.map(lambda path, leaf: wanted.update({path: leaf.array.shape}), stored.paths, stored.shapes)
        found = {array.path: array.shape for array in manifest.arrays if array.path.startswith(f"{subpath}/")}
        problems = shape_problems(wanted, found)
        if problems:
            raise ValueError(f"{folder} does not fit its config and tokenizer: {problems}")

    def load(self, leaves: Sequence[StoredLeaf]) -> list[jax.Array]:
        """The tensors of some leaves, each in the dtype of its spec.

        Of a stack of layers, those from the first to the last that `leaves` need are read at once, and one stack after
        another. Memory: the result, one such part of a stack and a copy of one layer of it, all in that dtype, and the
        chunks that hold the part, four at a time; a chunk that spans layers is read whole.

        Raises:
            ValueError: an array cannot be read; named.
        """
        by_path: dict[str, list[StoredLeaf]] = {}
        for leaf in leaves:
            by_path.setdefault(self._sources[leaf.source].path, []).append(leaf)
        tensors: dict[str, jax.Array] = {}
        for path, members in by_path.items():
            tensors |= self._load_from(path, members)
        return [tensors[leaf.source] for leaf in leaves]

    def _load_from(self, path: str, leaves: list[StoredLeaf]) -> dict[str, jax.Array]:
        """Tensors of one leaf of the model: of its layers, if it is a stack."""
        stored, sources = self._stored[path], [self._sources[leaf.source] for leaf in leaves]
        layers = [source.layer for source in sources if source.layer is not None]
        part = slice(min(layers), max(layers) + 1) if layers else ...
        # the terms of a router bias are exact in the fp32 that every plan keeps it in
        arrays = jax.tree.map(lambda path: self._read(path, part, leaves[0].spec.dtype), stored.paths)
        tensors = {}
        for leaf, source in zip(leaves, sources, strict=True):
            index = () if source.layer is None else (source.layer - min(layers),)
            value = jax.tree.map(partial(_at, index=index), arrays, stored.shapes)
            tensors[leaf.source] = _flattened(value, source.dims)
        return tensors

    def _read(self, path: str, part: slice | EllipsisType, dtype: np.dtype) -> np.ndarray:
        spec = tensorstore_serialization._create_ocdbt_spec(self._folder, path)
        try:
            store = tensorstore.open(spec, open=True, context=self._context).result()[part]
            record_transfer(store.size * store.dtype.numpy_dtype.itemsize, self._folder)
            return store.astype(dtype).read().result()
        except (ValueError, OSError) as error:
            reason = str(error).partition(" [")[0]  # what follows are places in TensorStore's own source
            raise ValueError(
                f"{self._folder}: {path} cannot be read, a file of the checkpoint is missing or damaged; copy it "
                f"again or take another one ({reason})"
            ) from error


def _at(array: np.ndarray, like: NamedArray, index: tuple[int, ...]) -> NamedArray:
    """An entry of the first axes of an array whose axes are those of `like`; all of it if the index is empty."""
    return NamedArray(array[*index, ...], like.axes[len(index) :])


_flattened = eqx.filter_jit(flattened)
