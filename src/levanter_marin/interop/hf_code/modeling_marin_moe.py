# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Marin mixture-of-experts family in plain PyTorch, for transformers 5: `model_type` "grug_moe", schemas 1 and 2.

Made to be read and to be exact, not to be fast: routed experts are a loop, every expert is on one device, nothing is
dropped. A forward pass takes whole rows, packed rows (`segment_ids`), padded batches (`attention_mask`), and
continues from a cache, which holds keys and values and the last inputs of every short convolution. It is made to load
checkpoints: a model made from a config alone has zeros for weights of its own kinds.

Shapes in comments: B rows, S tokens, T = cached + S, D hidden_size, N query heads, M key-value heads a layer uses,
H head_dim, E experts, K selected experts, L the width experts work in.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_marin_moe import MarinMoeHfConfig

GATE_RANK, PADDING = 128, -1
QK_NORM_EPS = OWN_VALUE_EPS = 1e-6
COMBINE_WEIGHT_SUM = 2.5
COMBINE_WEIGHT_EPS = 1e-9


class LayerCache(DynamicLayer):
    """Keys and values of one layer, and the last inputs of its short convolutions by site."""

    def __init__(self):
        super().__init__()
        self.convolution: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        super().reset()
        self.convolution = {}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.convolution = {site: state.index_select(0, beam_idx) for site, state in self.convolution.items()}

    def crop(self, *_) -> None:
        raise NotImplementedError("a short convolution cannot be rolled back: no assisted or contrastive generation")

    batch_repeat_interleave = batch_select_indices = crop


class MarinMoeCache(Cache):
    def __init__(self, num_layers: int):
        super().__init__(layers=[LayerCache() for _ in range(num_layers)])


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, cast back."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (normalized(x.float(), self.eps) * self.weight.float()).to(x.dtype)


def normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class GatedNorm(nn.Module):
    """x * sigmoid(up(silu(down(x)))): stands behind an RmsNorm (arXiv:2601.22966)."""

    def __init__(self, width: int):
        super().__init__()
        self.down_proj = nn.Linear(width, GATE_RANK, bias=False)
        self.up_proj = nn.Linear(GATE_RANK, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up_proj(F.silu(self.down_proj(x))))


class ShortConv(nn.Module):
    """out[t] = sum_lag weight[lag] * x[t - lag] per channel, over tokens of the same segment; in fp32, cast back."""

    def __init__(self, taps: int, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(taps, channels))

    def forward(
        self, x: torch.Tensor, segments: torch.Tensor | None, cache: LayerCache | None, site: str
    ) -> torch.Tensor:
        """x [B, S, C]; segments [B, T] or None where all tokens are one segment."""
        reach = self.weight.shape[0] - 1
        before = {} if cache is None else cache.convolution
        window = torch.cat([before.get(site, x.new_zeros(x.shape[0], reach, x.shape[2])), x], dim=1)
        if cache is not None:
            cache.convolution[site] = window[:, window.shape[1] - reach :]
        length = x.shape[1]
        if segments is not None:
            segments = F.pad(segments, (reach, 0), value=PADDING)[:, -(length + reach) :]
        out = torch.zeros_like(x, dtype=torch.float32)
        for lag, weight in enumerate(self.weight.float()):
            reached = window[:, reach - lag : reach - lag + length].float()
            if segments is not None:
                same = segments[:, reach - lag : reach - lag + length] == segments[:, reach:]
                reached = reached * same[..., None]
            out = out + reached * weight
        return out.to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float, adjacent: bool) -> torch.Tensor:
    """Turn the first half of each head by position-dependent angles; x [B, S, heads, H], positions [S]."""
    planes = x.shape[-1] // 4
    turning, rest = x[..., : 2 * planes].float(), x[..., 2 * planes :]
    inv_freq = theta ** -(torch.arange(planes, device=x.device, dtype=torch.float32) / planes)
    angle = (positions.float()[:, None] * inv_freq)[:, None, :]
    cos, sin = angle.cos(), angle.sin()
    first, second = (turning[..., 0::2], turning[..., 1::2]) if adjacent else turning.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack([first, second], dim=-1).flatten(-2) if adjacent else torch.cat([first, second], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention, then Exclusive Self Attention, then one gate a head.

    Local layers see the last `sliding_window` keys and rotate; global layers see every key and do not rotate. A layer
    uses the first of the stored key-value heads.
    """

    def __init__(self, config: MarinMoeHfConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.qk_mult = layer, config.head_dim, config.qk_mult
        self.num_heads, self.used = config.num_attention_heads, config.kv_heads_used(layer)
        self.window = None if config.layer_is_global(layer) else config.sliding_window
        self.rope_theta, self.adjacent = config.rope_theta, config.adjacent_rope
        inner, stored = self.num_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, stored, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, stored, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.attn_gate = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        for site in ("k", "v"):
            conv = ShortConv(config.sconv_kernel, stored) if site in config.conv_sites else None
            setattr(self, f"sconv_{site}", conv)

    def forward(
        self, x: torch.Tensor, segments: torch.Tensor | None, past: int, cache: MarinMoeCache | None
    ) -> torch.Tensor:
        """x [B, S, D], normalised; segments [B, T] or None; past = T - S."""
        batch, length, _ = x.shape
        layer_cache = None if cache is None else cache.layers[self.layer]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.sconv_k is not None:
            k = self.sconv_k(k, segments, layer_cache, "k")
        if self.sconv_v is not None:
            v = self.sconv_v(v, segments, layer_cache, "v")
        q = q.view(batch, length, self.num_heads, self.head_dim)
        k, v = (a.view(batch, length, -1, self.head_dim)[:, :, : self.used] for a in (k, v))
        q, k = (normalized(a.float(), QK_NORM_EPS).to(a.dtype) for a in (q, k))
        if self.window is not None:
            positions = torch.arange(past, past + length, device=x.device)
            q, k = (rotate(a, positions, self.rope_theta, self.adjacent) for a in (q, k))
        q = (q * self.qk_mult).transpose(1, 2)  # [B, N, S, H]
        keys, values = k.transpose(1, 2), v.transpose(1, 2)  # [B, M, S, H]
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer)  # [B, M, T, H]
        group = self.num_heads // self.used
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        mask = attention_mask(length, past, self.window, segments, x.device)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).transpose(1, 2)  # [B, S, N, H]

        own = v.repeat_interleave(group, dim=2).float()
        share = (out.float() * own).sum(-1, keepdim=True) / (own.square().sum(-1, keepdim=True) + OWN_VALUE_EPS)
        out = (out.float() - share * own).to(x.dtype)
        out = out * (2 * torch.sigmoid(self.attn_gate(x)))[..., None]
        return self.o_proj(out.flatten(2))


def attention_mask(
    length: int, past: int, window: int | None, segments: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """True where query [S] may see key [T]: [1 or B, 1, S, T]."""
    query, key = torch.arange(past, past + length, device=device)[:, None], torch.arange(past + length, device=device)
    mask = (key <= query) if window is None else (key <= query) & (key > query - window)
    mask = mask[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, past:, None] == segments[:, None, None, :])
    return mask


class SwiGlu(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Bank(nn.Module):
    """One matrix an expert: weight [E, out, in]."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int, inner: int):
        super().__init__()
        self.gate_proj = Bank(num_experts, inner, width)
        self.up_proj = Bank(num_experts, inner, width)
        self.down_proj = Bank(num_experts, width, inner)

    def forward(self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, L], selected and weights [tokens, K] -> [tokens, L], summed in fp32."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in selected.unique().tolist():
            token, slot = torch.where(selected == expert)
            h = x[token]
            h = F.silu(F.linear(h, self.gate_proj.weight[expert])) * F.linear(h, self.up_proj.weight[expert])
            h = F.linear(h, self.down_proj.weight[expert])
            out.index_add_(0, token, h.float() * weights[token, slot, None])
        return out.to(x.dtype)


class Router(nn.Module):
    """Logits in fp32; the bias moves the selection and is in no weight."""

    def __init__(self, config: MarinMoeHfConfig):
        super().__init__()
        self.num_selected = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, D] -> selected experts and their weights, both [tokens, K]."""
        logits = F.linear(x.float(), self.weight.float())
        selected = (logits + self.bias.float()).topk(self.num_selected, dim=-1).indices
        weights = torch.sigmoid(logits.gather(-1, selected))
        return selected, weights * (COMBINE_WEIGHT_SUM / (weights.sum(-1, keepdim=True) + COMBINE_WEIGHT_EPS))


class LatentMoe(nn.Module):
    """up(sum of experts(norm(down(x)))), routed by x (arXiv:2601.18089); without a latent space just the experts."""

    def __init__(self, config: MarinMoeHfConfig):
        super().__init__()
        width = config.latent_size or config.hidden_size
        self.has_latent = config.latent_size is not None
        self.router = Router(config)
        self.experts = Experts(config.num_experts, width, config.moe_intermediate_size)
        if self.has_latent:
            self.latent_down_proj = nn.Linear(config.hidden_size, width, bias=False)
            self.latent_norm = RmsNorm(width, config.rms_norm_eps)
            self.latent_up_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        selected, weights = self.router(flat)
        latent = self.latent_norm(self.latent_down_proj(flat)) if self.has_latent else flat
        out = self.experts(latent, selected, weights)
        return (self.latent_up_proj(out) if self.has_latent else out).view_as(x)


class Block(nn.Module):
    """x += conv(attention(norm(x))); h = norm(x); x += conv(moe(h) + sum of shared experts(h))."""

    def __init__(self, config: MarinMoeHfConfig, layer: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.input_layernorm = RmsNorm(width, eps)
        self.attn_gated_norm = GatedNorm(width)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp_gated_norm = GatedNorm(width)
        self.mlp = LatentMoe(config)
        shared = [SwiGlu(width, config.shared_expert_intermediate_size) for _ in range(config.shared_experts)]
        if config.schema == 1:
            self.shared_expert = shared[0]
        else:
            self.shared_experts = nn.ModuleList(shared)
        for site in ("attn", "mlp"):
            conv = ShortConv(config.sconv_kernel, width) if site in config.conv_sites else None
            setattr(self, f"sconv_{site}", conv)

    def forward(
        self, x: torch.Tensor, segments: torch.Tensor | None, past: int, cache: MarinMoeCache | None
    ) -> torch.Tensor:
        layer_cache = None if cache is None else cache.layers[self.layer]
        out = self.self_attn(self.attn_gated_norm(self.input_layernorm(x)), segments, past, cache)
        if self.sconv_attn is not None:
            out = self.sconv_attn(out, segments, layer_cache, "attn")
        x = x + out
        h = self.mlp_gated_norm(self.post_attention_layernorm(x))
        out = self.mlp(h)
        for shared in [self.shared_expert] if hasattr(self, "shared_expert") else self.shared_experts:
            out = out + shared(h)
        if self.sconv_mlp is not None:
            out = self.sconv_mlp(out, segments, layer_cache, "mlp")
        return x + out


class MarinMoeModel(nn.Module):
    def __init__(self, config: MarinMoeHfConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_norm, self.embed_gated_norm = RmsNorm(width, eps), GatedNorm(width)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm, self.final_gated_norm = RmsNorm(width, eps), GatedNorm(width)

    def forward(
        self, input_ids: torch.Tensor, segments: torch.Tensor | None, past: int, cache: MarinMoeCache | None
    ) -> torch.Tensor:
        """input_ids [B, S] -> final hidden states [B, S, D]."""
        x = self.embed_gated_norm(self.embed_norm(self.embed_tokens(input_ids)))
        for layer in self.layers:
            x = layer(x, segments, past, cache)
        return self.final_gated_norm(self.norm(x))


class GrugMoeForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MarinMoeHfConfig
    _no_split_modules = ("Block",)
    _keep_in_fp32_modules_strict = ("router.bias",)

    def __init__(self, config: MarinMoeHfConfig):
        super().__init__(config)
        self.model = MarinMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a cache without convolution states would be silently wrong

    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: MarinMoeCache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        segment_ids: torch.LongTensor | None = None,
        **_,
    ) -> CausalLMOutputWithPast:
        """Logits [B, S, vocab], and the mean loss where `labels` is given and not -100.

        Args:
            input_ids: [B, S].
            attention_mask: [B, T], 0 at padding, which is left of a row's tokens in generation.
            past_key_values: what an earlier call with `use_cache` returned.
            logits_to_keep: compute logits of the last so many tokens only; 0 is all.
            segment_ids: [B, S] for packed rows: tokens see their own segment only; negative is padding. Without
                cache. Positions run over the row, not over the segment.
        """
        cache = past_key_values
        if use_cache and cache is None:
            cache = MarinMoeCache(self.config.num_hidden_layers)
        if cache is not None and not isinstance(cache, MarinMoeCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; leave it out or give a MarinMoeCache")
        past = 0 if cache is None else cache.get_seq_length()
        total = past + input_ids.shape[1]
        if segment_ids is not None and (past or attention_mask is not None):
            raise ValueError("segment_ids are for whole rows: give neither a cache nor an attention_mask")
        if attention_mask is not None:
            if attention_mask.shape != (input_ids.shape[0], total):
                raise ValueError(f"attention_mask {tuple(attention_mask.shape)} must be {(input_ids.shape[0], total)}")
            segment_ids = None if attention_mask.all() else attention_mask.long() - 1
        hidden = self.model(input_ids, segment_ids, past, cache)
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        if labels is None:
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


# Checkpoints with one matrix an expert are stacked while they are read.
register_checkpoint_conversion_mapping(
    GrugMoeForCausalLM.__name__,
    [
        WeightConverter(
            source_patterns=f"mlp.experts.*.{matrix}.weight",
            target_patterns=f"mlp.experts.{matrix}.weight",
            operations=[MergeModulelist(dim=0)],
        )
        for matrix in ("gate_proj", "up_proj", "down_proj")
    ],
    overwrite=True,
)
