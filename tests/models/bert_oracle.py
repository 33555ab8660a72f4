"""An encoder written a second time, in float64 NumPy, one sequence at a time."""

import math
import operator

import jax
import numpy as np
from scipy.special import erf


def layer_norm(x, p, epsilon=1e-12):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def gelu(x):
    return x * 0.5 * (1 + erf(x / math.sqrt(2)))


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def attention(hidden, p, num_heads):
    """hidden [length, embed], no padding."""
    embed, head_dim = hidden.shape[1], p["query"]["kernel"].shape[2]
    flat = {
        n: hidden @ p[n]["kernel"].reshape(embed, -1) + p[n]["bias"].reshape(-1)
        for n in ("query", "key", "value")
    }
    joined = np.zeros_like(flat["query"])
    for head in range(num_heads):
        part = slice(head * head_dim, (head + 1) * head_dim)
        q, k, v = (flat[n][:, part] for n in ("query", "key", "value"))
        scores = np.exp(q @ k.T / math.sqrt(head_dim))
        joined[:, part] = scores / scores.sum(1, keepdims=True) @ v
    return joined @ p["out"]["kernel"].reshape(-1, embed) + p["out"]["bias"]


def feed_forward(x, p):
    return layer_norm(x + dense(gelu(dense(x, p["wi"])), p["wo"]), p["layer_norm"])


def encode(params, ids, mask, *, num_heads, choose, router_input="ffn_input", summary="cls"):
    """Hidden states of each text's real tokens, [length, embed].

    `choose` is an expert's number (Det-R), "sequence" or "token".
    """
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for row, real in zip(ids, mask, strict=True):
        row = row[: int(real.sum())]
        tables = p["embeddings"]
        token, position, kind = (tables[n]["embedding"] for n in ("token", "position", "type"))
        hidden = layer_norm(token[row] + position[: len(row)] + kind[0], tables["layer_norm"])
        for i in range(sum(name.startswith("layers_") for name in p)):
            layer = p[f"layers_{i}"]
            attended = hidden + attention(hidden, layer["attention"], num_heads)
            attended = layer_norm(attended, layer["attention_layer_norm"])
            if "mlp" in layer:
                hidden = feed_forward(attended, layer["mlp"])
                continue
            router = layer.get("router", p.get("router"))
            read = attended if router_input == "ffn_input" else hidden
            if choose == "sequence":
                u = read[0] if summary == "cls" else sum(read) / len(read)
                choices = [int(np.argmax(dense(u, router)))] * len(attended)
            elif choose == "token":
                choices = [int(np.argmax(dense(u, router))) for u in read]
            else:
                choices = [choose] * len(attended)
            experts = [jax.tree.map(operator.itemgetter(c), layer["experts"]) for c in choices]
            hidden = np.stack([*map(feed_forward, attended, experts)])
        yield hidden
