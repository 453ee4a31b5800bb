# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Makes Levanter store the chunks of a checkpoint whole; without this, expert banks can be lost in silence.

TensorStore (0.1.82 to 0.1.84, all that Levanter allows) gives a chunk of more than 2^20 elements an inner grid, zarr's
sharding codec. Where that grid divides three axes, as it does for a stacked expert bank {layer, experts, in, out}, a
write that may reference its source indefinitely, as Levanter's do, commits without storing anything, and the array
reads back as zeros. A spec that names its codecs gets no inner grid. Checkpoints written either way can be read.
"""

from levanter import tensorstore_serialization

_WHOLE = [{"name": "bytes", "configuration": {"endian": "little"}}]
_create_spec = tensorstore_serialization._create_ocdbt_spec


def _create_spec_of_whole_chunks(*args, **kwargs) -> dict:
    spec = _create_spec(*args, **kwargs)
    if "metadata" in spec:  # only what is written has them
        spec["metadata"]["codecs"] = _WHOLE
    return spec


tensorstore_serialization._create_ocdbt_spec = _create_spec_of_whole_chunks
