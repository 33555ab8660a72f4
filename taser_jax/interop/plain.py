"""Converts a dual encoder to plain BERTs, one per role (and task), and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.tree_util import KeyPath

from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import Params, Towers
from taser_jax.models.fusion import FUSION_PARTS
from taser_jax.storage.errors import ConfigError

_PASSAGE_TOWER = "passage_encoder"
_WHERE = "from_plain_encoders"


def plain_encoder(
    params: Params, config: DualEncoderConfig, role: Role, *, task: str | None = None
) -> Params:
    """The parameters of the plain BERT that encodes a role's texts at inference.

    With Det-R it has the role's expert in every specialised block; with I > 2 experts, the first of
    the role's group.

    Args:
        params: parameters of the dual encoder.
        config: its configuration.
        role: the role.
        task: the task whose query tower to use, if tasks have their own.

    Returns:
        `embeddings/...`, `layers_i/{attention, attention_layer_norm, mlp}/...`.

    Raises:
        ConfigError: routing is learned, so the expert depends on the text; or tasks have query
            towers and no task is given.
    """
    experts = config.experts
    if experts.learned:
        problem = f"routing is {experts.routing.value!r}: no single BERT computes the same"
        fix = "use a format with the router: saved_model or stablehlo"
        raise ConfigError(problem, where="plain_encoder", fix=fix)
    tower = params[config.tower_name(role, task)]
    expert, _ = experts.group(role)
    return {name: _plain_block(block, expert) for name, block in tower.items()}


def from_plain_encoders(
    query: Params, passage: Params, *, config: DualEncoderConfig, params: Params
) -> Params:
    """A dual encoder built from two plain BERTs: the inverse of `plain_encoder`.

    Separate towers get one each; the query towers of all tasks get the same one. For a tied encoder
    the two must be equal, except in the feed-forwards of Det-R's specialised blocks: there every
    expert of a role's group is a copy of that role's feed-forward. Experts of a learned router are
    all copies of one feed-forward.

    Args:
        query: parameters of the plain encoder of queries.
        passage: parameters of the plain encoder of passages.
        config: configuration of the dual encoder.
        params: parameters of the dual encoder; its routers and its decoder over documents are kept.

    Returns:
        NumPy parameters, except those kept from `params`.

    Raises:
        ConfigError: a tied parameter differs between the two, or the trees do not fit.
    """
    plain = {Role.QUERY: flatten_dict(query), Role.PASSAGE: flatten_dict(passage)}

    def tied(path: tuple[str, ...]) -> np.ndarray:
        value = plain[Role.QUERY][path]
        if query is not passage and not np.array_equal(value, plain[Role.PASSAGE][path]):
            problem = f"{'/'.join(path)} of the query encoder is not the passage encoder's"
            fix = "use towers=SEPARATE, or specialise the blocks that differ"
            raise ConfigError(problem, where=_WHERE, fix=fix)
        return value

    def choose(key_path: KeyPath, leaf: Any) -> Any:
        tower, *rest = (str(key.key) for key in key_path)
        if "router" in rest or rest[0] in FUSION_PARTS:
            return leaf
        path = tuple("mlp" if key == "experts" else key for key in rest)
        if path not in plain[Role.QUERY] or path not in plain[Role.PASSAGE]:
            layers = config.bert.num_layers
            problem = f"no parameter {'/'.join(path)} in the plain encoder"
            raise ConfigError(problem, where=_WHERE, fix=f"give one of {layers} layers")
        by_role = config.experts.num_experts > 1 and not config.experts.learned
        if config.towers is Towers.SEPARATE:
            role = Role.PASSAGE if tower == _PASSAGE_TOWER else Role.QUERY
            values = [plain[role][path]]
        elif "experts" in rest and by_role:
            values = [plain[Role.QUERY][path], plain[Role.PASSAGE][path]]
        else:
            values = [tied(path)]
        # A separate array for every parameter: towers and experts diverge in training.
        if "experts" in rest:
            value = np.repeat(np.stack(values), config.experts.num_experts // len(values), axis=0)
        else:
            value = np.array(values[0])
        return _checked(value, leaf, "/".join((tower, *rest)))

    return jax.tree_util.tree_map_with_path(choose, params)


def _plain_block(block: Params, expert: int) -> Params:
    if "experts" not in block:
        return block
    rest = {name: value for name, value in block.items() if name != "experts"}
    return {**rest, "mlp": jax.tree.map(lambda leaf: leaf[expert], block["experts"])}


def _checked(value: np.ndarray, leaf: Any, name: str) -> np.ndarray:
    if value.shape != tuple(leaf.shape):
        problem = f"parameter {name} would have shape {value.shape}, not {tuple(leaf.shape)}"
        fix = "take the sizes of the dual encoder from the checkpoint (pretrained_bert)"
        raise ConfigError(problem, where=_WHERE, fix=fix)
    return value
