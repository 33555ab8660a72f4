"""T5 written a second time, in float64 NumPy: one sequence, one head, one position at a time."""

import math

import jax
import numpy as np


def rms_norm(x, p):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def feed_forward(x, p):
    if "wi" in p:
        return np.maximum(x @ p["wi"]["kernel"], 0) @ p["wo"]["kernel"]
    return (gelu(x @ p["wi_0"]["kernel"]) * (x @ p["wi_1"]["kernel"])) @ p["wo"]["kernel"]


def bucket(distance, num_buckets, max_distance):
    half = num_buckets // 2
    exact = half // 2
    start = half if distance > 0 else 0
    steps = abs(distance)
    if steps < exact:
        return start + steps
    grown = math.log(steps / exact) / math.log(max_distance / exact) * (half - exact)
    return start + min(half - 1, exact + int(grown + 1e-9))


def attention(queries, keys, p, bias=None, seen=None):
    """queries [q, embed], keys [k, embed], bias [heads, q, k]; `seen` gets each head's scores."""
    result = np.zeros((len(queries), p["out"]["kernel"].shape[-1]))
    for head in range(p["out"]["kernel"].shape[0]):
        q, k, v = (
            x @ p[name]["kernel"][:, head]
            for name, x in (("query", queries), ("key", keys), ("value", keys))
        )
        scores = q @ k.T + (0 if bias is None else bias[head])
        if seen is not None:
            seen.append(scores[0])
        scores = np.exp(scores - scores.max(1, keepdims=True))
        attended = scores / scores.sum(1, keepdims=True) @ v
        result += attended @ p["out"]["kernel"][head]
    return result


def _float64(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def encode(params, ids, *, num_buckets, max_distance):
    """Hidden states of one unpadded sequence."""
    p, length = _float64(params), len(ids)
    hidden, p = p["token_embedder"]["embedding"][ids], p["encoder"]
    table = p["relpos_bias"]["rel_embedding"]
    bias = np.zeros((len(table), length, length))
    for i in range(length):
        for j in range(length):
            bias[:, i, j] = table[:, bucket(j - i, num_buckets, max_distance)]
    for i in range(sum(name.startswith("layers_") for name in p)):
        layer = p[f"layers_{i}"]
        x = rms_norm(hidden, layer["pre_attention_layer_norm"])
        hidden = hidden + attention(x, x, layer["attention"], bias)
        hidden = hidden + feed_forward(rms_norm(hidden, layer["pre_mlp_layer_norm"]), layer["mlp"])
    return rms_norm(hidden, p["encoder_norm"])


def first_decoder_output(params, encoded, seen=None):
    p = _float64(params)
    hidden, p = p["token_embedder"]["embedding"][:1], p["decoder"]
    # Of the position itself: bucket 0 of each head, and it must not matter.
    bias = p["relpos_bias"]["rel_embedding"][:, :1, None]
    for i in range(sum(name.startswith("layers_") for name in p)):
        layer = p[f"layers_{i}"]
        x = rms_norm(hidden, layer["pre_self_attention_layer_norm"])
        hidden = hidden + attention(x, x, layer["self_attention"], bias)
        x = rms_norm(hidden, layer["pre_cross_attention_layer_norm"])
        hidden = hidden + attention(x, encoded, layer["encoder_decoder_attention"], seen=seen)
        hidden = hidden + feed_forward(rms_norm(hidden, layer["pre_mlp_layer_norm"]), layer["mlp"])
    return rms_norm(hidden, p["decoder_norm"])[0]


def fused(params, query, documents, **sizes):
    """MoMA's equation 5 and, by equation 9, the attention to each segment, the query first."""
    segments = [encode(params, ids, **sizes) for ids in (query, *documents)]
    seen = []
    output = first_decoder_output(params, np.concatenate(segments), seen)
    cuts = np.cumsum([len(segment) for segment in segments])[:-1]
    totals = np.zeros(len(segments))
    for scores in seen:
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        totals += [part.sum() for part in np.split(probabilities, cuts)]
    return output, totals
