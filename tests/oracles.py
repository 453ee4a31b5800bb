# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The layers and the router in NumPy and fp64, one plain statement each, never optimised.

Arrays carry their axes in the order of the modules' own weights: linear weights [out, in], B rows, S positions,
D model width, H query heads, N key-value heads stored, e head size, T tokens, E experts, L latent, F expert width.
"""

import numpy as np

OWN_VALUE_EPS = 1e-6
WEIGHT_SUM_EPS = 1e-9
LOG_EPS = 1e-6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, gain=1.0, *, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain


def gated_norm(x, down, up):
    """x [..., D], down [R, D], up [D, R]."""
    return x * sigmoid(silu(x @ down.T) @ up.T)


def swiglu(x, gate, up, down):
    """gate and up [F, D], down [D, F]."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def short_conv(x, weight, segments):
    """x [B, S, channels...], weight [taps, channels...], segments [B, S] or None."""
    out = np.zeros_like(x)
    rows, length = x.shape[:2]
    for b in range(rows):
        for t in range(length):
            for lag in range(min(len(weight), t + 1)):
                if segments is None or segments[b, t] == segments[b, t - lag]:
                    out[b, t] += weight[lag] * x[b, t - lag]
    return out


def exclude_own_value(y, v):
    return y - (y * v).sum(-1, keepdims=True) / ((v * v).sum(-1, keepdims=True) + OWN_VALUE_EPS) * v


def rotary(x, positions, *, rope_dim, theta, adjacent):
    """x [B, S, heads, e], positions [B, S]: the first `rope_dim` dimensions as complex numbers, turned."""
    half = rope_dim // 2
    real, imag = (slice(0, rope_dim, 2), slice(1, rope_dim, 2)) if adjacent else (slice(half), slice(half, rope_dim))
    angle = positions[:, :, None, None] * float(theta) ** (-np.arange(half) / max(half, 1))
    turned = (x[..., real] + 1j * x[..., imag]) * np.exp(1j * angle)
    out = x.copy()
    out[..., real], out[..., imag] = turned.real, turned.imag
    return out


def softmax_attention(q, k, v, *, window, segments):
    """Head h of q [B, S, H, e] reads key-value head h * N // H of k and v [B, S, N, e]."""
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    t = np.arange(q.shape[1])
    for b in range(q.shape[0]):
        seen = (t[None] <= t[:, None]) & (t[None] > t[:, None] - window)
        if segments is not None:
            seen &= segments[b][None] == segments[b][:, None]
        for h in range(q.shape[2]):
            scores = q[b, :, h] @ k[b, :, h // group].T / np.sqrt(q.shape[-1])
            p = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(-1, keepdims=True)), 0)
            out[b, :, h] = p / p.sum(-1, keepdims=True) @ v[b, :, h // group]
    return out


def attention(x, weights, config, *, rotates, kv_heads, window, segments=None, positions=None, intermediates=None):
    """The whole layer. x [B, S, D]; weights q [H, e, D], k and v [N, e, D], o [D, H, e], gate [H, D] and
    sconv_k, sconv_v [taps, N, e], the last three where they are; `kv_heads` of N are used.
    """
    q, k, v = (np.einsum("bsd,hed->bshe", x, weights[name]) for name in ("q", "k", "v"))
    if "sconv_k" in weights:
        k = short_conv(k, weights["sconv_k"], segments)
    if "sconv_v" in weights:
        v = short_conv(v, weights["sconv_v"], segments)
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    if config.qk_norm:
        q, k = rms_norm(q, eps=config.qk_norm_eps), rms_norm(k, eps=config.qk_norm_eps)
    if rotates:
        if positions is None:
            positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
        rope = {"rope_dim": config.rope_dim, "theta": config.rope_theta}
        rope["adjacent"] = config.rope_pairing == "adjacent"
        q, k = rotary(q, positions, **rope), rotary(k, positions, **rope)
    q = q * config.qk_mult
    out = softmax_attention(q, k, v, window=window, segments=segments)
    if config.exclusive:
        out = exclude_own_value(out, np.repeat(v, q.shape[2] // kv_heads, axis=2))
    if "gate" in weights:
        out = out * 2 * sigmoid(np.einsum("bsd,hd->bsh", x, weights["gate"]))[..., None]
    return np.einsum("bshe,dhe->bsd", out, weights["o"])


def select_experts(logits, bias, *, top, renormalize=True, total=2.5):
    """logits [T, E] -> selected [T, K], combine weights [T, K], alpha [T]; the lower index first among equals."""
    biased = logits + bias
    order = np.argsort(-biased, axis=-1, kind="stable")
    selected = order[:, :top]
    weights = sigmoid(np.take_along_axis(logits, selected, axis=-1))
    if renormalize:
        weights = weights * total / (weights.sum(-1, keepdims=True) + WEIGHT_SUM_EPS)
    return selected, weights, np.take_along_axis(biased, order[:, top : top + 1], axis=-1)[:, 0]


def latent_moe(x, weights, bias, valid, *, top, eps, renormalize=True):
    """x [T, D]; weights router [D, E], gate and up [E, L, F], down [E, F, L], and where they are latent_down
    [L, D], latent_norm [L], latent_up [D, L]; valid [T] or None.
    """
    selected, combine, _ = select_experts(x @ weights["router"], bias, top=top, renormalize=renormalize)
    z = x @ weights["latent_down"].T if "latent_down" in weights else x
    if "latent_norm" in weights:
        z = rms_norm(z, weights["latent_norm"], eps=eps)
    out = np.zeros_like(z)
    for t in range(len(x)):
        for expert, share in zip(selected[t], combine[t], strict=True):
            if valid is None or valid[t]:
                gate, up, down = (weights[name][expert].T for name in ("gate", "up", "down"))
                out[t] += share * swiglu(z[t], gate, up, down)
    return out @ weights["latent_up"].T if "latent_up" in weights else out


def router_bias(logits, bias, valid, *, top):
    """The next step's bias of the exact upper K/E quantile, rank floor(valid * K / E)."""
    _, _, alpha = select_experts(logits, bias, top=top)
    margins = np.sort((logits - alpha[:, None])[valid], axis=0)[::-1]
    beta = margins[max(len(margins) * top // logits.shape[1], 1) - 1]
    return beta.mean() - beta


def routing_statistics(logits, selected, valid):
    """Loads, entropy of the loads, router z-loss and load-balancing loss."""
    num_experts, top = logits.shape[1], selected.shape[1]
    load = np.zeros(num_experts)
    for t in np.flatnonzero(valid):
        load[selected[t]] += 1
    count = max(valid.sum(), 1)
    share = load / max(load.sum(), 1)
    z = np.log(np.exp(logits).sum(-1))
    probability = (np.exp(logits - z[:, None]) * valid[:, None]).sum(0) / count
    return {
        "expert_load": load,
        "routing_entropy": -(share * np.log(share + LOG_EPS)).sum(),
        "router_z_loss": (z**2 * valid).sum() / count,
        "load_balancing_loss": num_experts * (share * top * probability).sum(),
    }
