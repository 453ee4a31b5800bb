# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Hugging Face configuration of the Marin mixture-of-experts family (`model_type` "grug_moe", schemas 1 and 2)."""

from transformers import PretrainedConfig

SUPPORTED_SCHEMAS = (1, 2)


class MarinMoeHfConfig(PretrainedConfig):
    """Holds the keys of a `config.json` as attributes, without defaults of its own.

    Schema 1 is the 67B model: no latent space, no short convolutions, one shared expert, one count of key-value
    heads, split-half rotary pairing. The properties below give its fixed values where schema 2 has a key.
    """

    model_type = "grug_moe"

    @property
    def schema(self) -> int:
        """`grugmoe_artifact_schema_version`; a config without it is of schema 1."""
        schema = getattr(self, "grugmoe_artifact_schema_version", 1)
        if schema not in SUPPORTED_SCHEMAS:
            raise ValueError(f"grugmoe_artifact_schema_version={schema}; this code reads {SUPPORTED_SCHEMAS}")
        return schema

    @property
    def latent_size(self) -> int | None:
        """Width of the space that routed experts work in; None is the model's own width."""
        return self.latent_dim if self.schema == 2 else None

    @property
    def conv_sites(self) -> tuple[str, ...]:
        """Short convolutions, among "k", "v", "attn", "mlp"."""
        return tuple(self.sconv_sites) if self.schema == 2 and self.sconv else ()

    @property
    def shared_experts(self) -> int:
        return self.num_shared_experts if self.schema == 2 else 1

    @property
    def adjacent_rope(self) -> bool:
        """True: dimensions (2i, 2i + 1) rotate together; False: (i, i + quarter of head_dim)."""
        return self.schema == 2 and self.rope_fused

    def layer_is_global(self, layer: int) -> bool:
        """Every `global_every`-th layer sees all earlier keys, and so does the last one."""
        every = self.global_every if self.schema == 2 else 4
        return (layer + 1) % every == 0 or layer == self.num_hidden_layers - 1

    def kv_heads_used(self, layer: int) -> int:
        """How many of the stored key-value heads a layer uses: the first ones."""
        used = None
        if self.schema == 2:
            used = self.global_kv_heads if self.layer_is_global(layer) else self.local_kv_heads
        return self.num_key_value_heads if used is None else used
