"""TASER's layer-wise learning-rate decay: lower layers move less."""

from __future__ import annotations

import re

import jax
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import Rules, assign, parameter_paths
from taser_jax.storage.errors import ConfigError

# A decoder that fuses documents lies above the encoder, although it has layers of its own.
_ENCODER = r"(?!(?:.*/)?fusion/)(?:.*/)?"
_LAYER = re.compile(rf"{_ENCODER}layers_(\d+)/.*")
_ENCODER_LAYER = re.compile(r"(?:.*/)?encoder/layers_(\d+)/.*")
_DECODER_LAYER = re.compile(r"(?:.*/)?decoder/layers_(\d+)/.*")
_T5_EMBEDDING = re.compile(r"(?:.*/)?token_embedder/.*")


def layer_factors(params: PyTree, *, decay: float) -> PyTree[float]:
    """The factor decay^(n + 2 − depth) of each parameter's learning rate, for n layers.

    TASER's code with n = 12 and decay 0.8 has embeddings at depth 0 (0.8^14 = 0.044), layer i
    (from 0) at depth i + 1 (layer 0: 0.055, layer 11: 0.64) and everything above the layers at
    depth 14 (factor 1), a decoder that fuses documents too. A T5's decoder lies above its encoder:
    n counts the layers of both.

    Args:
        params: parameters, arrays or abstract, with paths that hold "layers_<i>".
        decay: factor per layer; 1 changes nothing.

    Returns:
        A tree of floats shaped as `params`.

    Raises:
        ConfigError: there is no "layers_<i>", or the table does not cover a parameter once.
    """
    if not 0 < decay <= 1:
        fix = "take a number above 0 and at most 1 (TASER's is 0.8); None turns it off"
        raise ConfigError(f"layer decay {decay}", where="OptimizerConfig.layer_decay", fix=fix)
    is_t5 = any(map(_T5_EMBEDDING.fullmatch, parameter_paths(params)))
    num_layers = sum(_count_t5_layers(params)) if is_t5 else _count_layers(params)
    depths = t5_layer_depths(params) if is_t5 else layer_depths(params)
    tree = assign(depths, params, table="layer depth table")
    return jax.tree.map(lambda depth: decay ** (num_layers + 2 - depth), tree)


def layer_depths(params: PyTree) -> tuple[tuple[str, int], ...]:
    """TASER's depth table, for the names of our parameters.

    A router in a layer has that layer's depth. A gate shared by all specialised blocks lies
    outside the layers and has depth 8 of 12 in TASER's code (factor 0.262), here two thirds of n.
    Rules that would match nothing are left out.

    Args:
        params: parameters, arrays or abstract.

    Returns:
        (regular expression, depth) pairs.
    """
    num_layers = _count_layers(params)
    in_layer = rf"{_ENCODER}layers_\d+/.*"
    embeddings = r"(?:.*/)?embeddings/.*"
    gate = rf"(?!{in_layer})(?:.*/)?router/.*"
    above = rf"(?!{in_layer}|{embeddings}|(?:.*/)?router/.*).*"
    rules = [
        (embeddings, 0),
        *((rf"{_ENCODER}layers_{layer}/.*", layer + 1) for layer in range(num_layers)),
        (gate, round(2 * num_layers / 3)),
        (above, num_layers + 2),
    ]
    return _matching(rules, params)


def t5_layer_depths(params: PyTree) -> tuple[tuple[str, int], ...]:
    """The depth table of a T5 with T5X's names: layers in the order in which a text passes.

    No paper has a rule for encoder-decoders; this carries TASER's over: token embeddings at depth
    0, layer i of the encoder (from 0) at i + 1, layer j of the decoder after all of those, a
    stack's position biases with its first layer, which owns them in T5. The last stack's norm and a
    projection lie above the layers; an encoder's norm below a decoder goes with its last layer.

    Args:
        params: parameters, arrays or abstract.

    Returns:
        (regular expression, depth) pairs; no rule covers a parameter of another name.
    """
    num_encoder, num_decoder = _count_t5_layers(params)
    above = num_encoder + num_decoder + 2
    rules = [
        (_T5_EMBEDDING.pattern, 0),
        (r"(?:.*/)?encoder/relpos_bias/.*", 1),
        (r"(?:.*/)?encoder/encoder_norm/.*", num_encoder if num_decoder else above),
        (r"(?:.*/)?decoder/relpos_bias/.*", num_encoder + 1),
        (r"(?:.*/)?decoder/decoder_norm/.*", above),
        (r"(?:.*/)?projection_layer/.*", above),
        *((rf"(?:.*/)?encoder/layers_{i}/.*", i + 1) for i in range(num_encoder)),
        *((rf"(?:.*/)?decoder/layers_{j}/.*", num_encoder + j + 1) for j in range(num_decoder)),
    ]
    return _matching(rules, params)


def _matching(rules: Rules[int], params: PyTree) -> tuple[tuple[str, int], ...]:
    """The rules that match a parameter."""
    paths = parameter_paths(params)
    return tuple(rule for rule in rules if any(re.fullmatch(rule[0], path) for path in paths))


def _count_t5_layers(params: PyTree) -> tuple[int, int]:
    """Numbers of layers of the encoder and of the decoder, which all towers share."""
    paths = parameter_paths(params)
    counts = [
        1 + max((int(match[1]) for path in paths if (match := layer.fullmatch(path))), default=-1)
        for layer in (_ENCODER_LAYER, _DECODER_LAYER)
    ]
    return counts[0], counts[1]


def _count_layers(params: PyTree) -> int:
    found = [int(match[1]) for path in parameter_paths(params) if (match := _LAYER.fullmatch(path))]
    if not found:
        found_none = 'no parameter lies in a layer, "layers_<i>/..."'
        raise ConfigError(found_none, where="OptimizerConfig.layer_decay", fix="set it to None")
    return max(found) + 1
