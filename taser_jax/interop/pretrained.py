"""Pretrained weights as a dual encoder's parameters: BERT's in DPR, TASER or Shared, and T5's."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from taser_jax.interop.bert import encoder_from_tensors
from taser_jax.interop.bert_formats import bert_config
from taser_jax.interop.hub import fetch, read_encoder_settings, read_normalization, read_projection
from taser_jax.interop.t5 import t5_config, t5_from_t5x, t5_from_tensors, t5x_t5_config, tower_of
from taser_jax.interop.t5x import is_t5x_checkpoint, read_t5x
from taser_jax.interop.tensors import CONFIG_FILE, Path, check_sizes, read_tensors
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.bert_config import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import ModelConfig, Params, Towers
from taser_jax.models.layers import SIZES
from taser_jax.models.parameters import check_same_parameters
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5 import T5Config, rescale
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import builds

if TYPE_CHECKING:
    from taser_jax.data.text.vocabularies import Vocabulary

Source = str | os.PathLike[str]

# Of training, never of a checkpoint.
_NUMERICS = ("dropout_rate", "dtype", "remat", "scan")
# Fields that must be equal for the weights to have the same meaning.
_T5_MUST_MATCH = (*SIZES, "num_decoder_layers", "mlp_activations", "num_buckets", "position_bias")
_PROJECTION = "projection_layer"
_TOKENIZERS = ("vocab.txt", "tokenizer.json", "vocabulary.json", "spiece.model")
_MUST_MATCH = (
    *(*SIZES, "max_length", "type_vocab_size", "activation", "layer_norm_epsilon"),
    *("family", "rotary"),
)


@builds
def pretrained_bert(
    source: Source, *, num_layers: int | None = None, numerics: BertConfig = BertConfig()
) -> BertConfig:
    """The configuration of a checkpoint's encoder: its sizes, with the given training numerics.

    Args:
        source: a Hugging Face directory, or an id on its hub.
        num_layers: number of first blocks to keep; None keeps all.
        numerics: source of dropout rates, dtype, rematerialisation and attention kernel.

    Raises:
        DataError: the source does not exist or is damaged.
        ConfigError: another architecture, or blocks that it does not have.
    """
    directory = fetch(source)
    if is_t5x_checkpoint(directory) and not (directory / CONFIG_FILE).is_file():
        problem = "a T5X checkpoint, which does not have all settings of a BERT"
        fix = "set DualEncoderConfig.bert = @BertConfig(), with the settings that T5X trained"
        raise ConfigError(problem, where=str(source), fix=fix)
    sizes = _first_blocks(bert_config(directory), num_layers, where=str(source))
    names = (*_NUMERICS, "attention_dropout_rate", "attention")
    return dataclasses.replace(sizes, **{name: getattr(numerics, name) for name in names})


@builds
def pretrained_pooling(source: Source) -> Pooling:
    """The pooling that a checkpoint's modules.json names; [CLS] without a modules.json."""
    return read_encoder_settings(fetch(source)).pooling


@builds
def pretrained_normalization(source: Source) -> Normalization:
    """The normalisation that a checkpoint's modules.json names; NONE without a modules.json."""
    return read_encoder_settings(fetch(source)).normalization


def _first_blocks(checkpoint: BertConfig, num_layers: int | None, *, where: str) -> BertConfig:
    if num_layers is None:
        return checkpoint
    if not 1 <= num_layers <= checkpoint.num_layers:
        problem = f"{num_layers} layers of a checkpoint of {checkpoint.num_layers}"
        fix = f"keep 1 to {checkpoint.num_layers} layers"
        raise ConfigError(problem, where=where, fix=fix)
    return dataclasses.replace(checkpoint, num_layers=num_layers)


@builds
def pretrained_t5(source: Source, *, numerics: T5Config = T5Config()) -> T5Config:
    """The configuration of a checkpoint's T5: its sizes, with the given training numerics.

    Args:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint.
        numerics: source of dropout rate, dtype, rematerialisation and `initialization` (how weights
            are rescaled on loading).

    Raises:
        DataError: the source does not exist or is damaged.
        ConfigError: another architecture.
    """
    directory = fetch(source)
    sizes = _t5_sizes(directory, _t5x_tree(directory, of_t5=True))
    names = (*_NUMERICS, "initialization")
    return dataclasses.replace(sizes, **{name: getattr(numerics, name) for name in names})


def _t5x_tree(directory: pathlib.Path, *, of_t5: bool) -> Params | None:
    """Parameters of a T5X checkpoint, which only a T5's source must be; None of Hugging Face's."""
    if (directory / CONFIG_FILE).is_file():
        return None
    return read_t5x(directory) if of_t5 or is_t5x_checkpoint(directory) else None


def _t5_sizes(directory: pathlib.Path, tree: Params | None) -> T5Config:
    """Sizes of a T5X checkpoint's tree, or of a Hugging Face directory."""
    if tree is not None:
        return t5x_t5_config(tree, where=str(directory))
    return t5_config(directory)


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Weights that encoders start from.

    Attributes:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint, of T5 or of a dual
            encoder of ours (`interop.t5x_model`).
        num_layers: number of its first blocks to keep (BERT only); None keeps all.
        passage_source: another checkpoint for passages, where roles have weights of their own.
    """

    source: str
    num_layers: int | None = None
    passage_source: str | None = None


def read_pretrained(
    pretrained: Pretrained,
    *,
    config: ModelConfig,
    params: Params,
    vocabulary: pathlib.Path | None = None,
) -> Params:
    """Reads pretrained weights into the shape of a model.

    Every tower is a copy of them, and every expert an exact copy of its block's feed-forward with
    the output LayerNorm (TASER, section 3.3). A T5's weights are rescaled as its `initialization`
    says; a projection comes from a T5X dual encoder or a sentence-transformers directory that has
    one.

    Args:
        pretrained: where they lie, and which blocks are taken.
        config: the model.
        params: its parameters; abstract ones will do.
        vocabulary: what texts were tokenised with; compared with the checkpoint's own.

    Returns:
        NumPy arrays where the checkpoint has the parameter, the leaf of `params` elsewhere
        (routers, a fusion's decoder, a projection).

    Raises:
        ConfigError: sizes or vocabularies differ; the message has both.
        DataError: missing or damaged files.
    """
    # Asks a hub once.
    names = (pretrained.source, pretrained.passage_source)
    directories = [fetch(name) for name in names if name is not None]
    if vocabulary is not None:
        for directory in directories:
            check_words(directory, vocabulary)
    with phase(f"read {pretrained.source}"):
        encoders: list[Params] = []
        for directory in directories:
            tree = _t5x_tree(directory, of_t5=isinstance(config, T5DualEncoderConfig))
            is_dual = tree is not None and tower_of(tree) is not tree
            if tree is not None and (is_dual or set(tree) == set(config.tower_names)):
                # Of a dual encoder that T5X trained (`t5x_model`).
                fix = "set the model that T5X trained: towers, embedding and sizes"
                check_same_parameters(tree, params, where=str(directory), fix=fix)
                return tree
            if isinstance(config, DualEncoderConfig):
                encoders.append(_read_bert(directory, config.bert, pretrained.num_layers))
            else:
                assert isinstance(config, T5DualEncoderConfig)
                encoders.append(_read_t5(directory, config, tree))
        return from_plain_encoders(encoders[0], encoders[-1], config=config, params=params)


def _read_bert(directory: pathlib.Path, config: BertConfig, num_layers: int | None) -> Params:
    where = str(directory)
    sizes = _first_blocks(bert_config(directory), num_layers, where=where)
    setting = "bert = pretrained_bert(source), whose num_layers keeps its first blocks only"
    check_sizes(sizes, config, names=_MUST_MATCH, where=where, setting=setting)
    return encoder_from_tensors(read_tensors(directory), sizes, where=where)


def _read_t5(directory: pathlib.Path, config: T5DualEncoderConfig, tree: Params | None) -> Params:
    """A T5 with its projection, from files of Hugging Face or a T5X checkpoint's tree."""
    where = str(directory)
    model, sizes = config.t5, _t5_sizes(directory, tree)
    if config.embedding is T5Embedding.ENCODER_MEAN:
        model = dataclasses.replace(model, num_decoder_layers=0)
    if not model.num_decoder_layers:
        sizes = dataclasses.replace(sizes, num_decoder_layers=0)
    setting = "t5 = pretrained_t5(source)"
    check_sizes(sizes, model, names=_T5_MUST_MATCH, where=where, setting=setting)
    if tree is None:
        t5 = t5_from_tensors(read_tensors(directory), model, where=where)
        projection = read_projection(directory)
        named = read_normalization(directory)
        if named not in (None, config.normalization):
            logger.warning(
                "%s: its modules.json names normalization %r, and T5DualEncoderConfig has %r",
                *(directory, named.value, config.normalization.value),
            )
    else:
        t5 = t5_from_t5x(tree, model, where=where)
        projection = tree.get(_PROJECTION, {}).get("kernel")
    t5 = rescale(t5, model.initialization)
    if projection is None:
        return t5
    expected = (model.embed_dim, config.projection_dim)
    if projection.shape != expected:
        problem = f"{_PROJECTION}/kernel has shape {projection.shape}, not {expected}"
        fix = f"set projection_dim={projection.shape[1]}"
        raise ConfigError(problem, where=where, fix=fix)
    return {**t5, _PROJECTION: {"kernel": np.asarray(projection, np.float32)}}


def from_plain_encoders(
    query: Params, passage: Params, *, config: ModelConfig, params: Params
) -> Params:
    """A dual encoder built from two plain encoders: the inverse of `bert.plain_encoder`.

    Separate towers get one each; the query towers of all tasks get the same one. For a tied encoder
    the two must be equal, except in the feed-forwards of Det-R's specialised blocks: there every
    expert of a role's group is a copy of that role's feed-forward. Experts of a learned router are
    all copies of one feed-forward.

    Args:
        query: parameters of the plain encoder of queries, of the dual encoder's sizes.
        passage: parameters of the plain encoder of passages.
        config: configuration of the dual encoder.
        params: parameters of the dual encoder; those that plain encoders lack are kept.

    Returns:
        NumPy parameters, except those kept from `params`.

    Raises:
        ConfigError: a tied parameter differs between the two.
    """
    plain = {Role.QUERY: flatten_dict(query), Role.PASSAGE: flatten_dict(passage)}
    experts = config.experts if isinstance(config, DualEncoderConfig) else ExpertConfig()
    by_role = experts.num_experts > 1 and not experts.learned
    passage_tower = config.tower_name(Role.PASSAGE, None)

    def tied(path: Path) -> np.ndarray:
        value = plain[Role.QUERY][path]
        if query is not passage and not np.array_equal(value, plain[Role.PASSAGE][path]):
            problem = f"{'/'.join(path)} of the query encoder is not the passage encoder's"
            fix = "set towers='separate', or specialise the blocks that differ"
            raise ConfigError(problem, where="passage_source", fix=fix)
        return value

    def choose(key_path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | np.ndarray:
        tower, *rest = (str(key.key) for key in key_path)
        path = tuple("mlp" if key == "experts" else key for key in rest)
        if path not in plain[Role.QUERY]:
            return leaf
        if config.towers is Towers.SEPARATE:
            values = [plain[Role.PASSAGE if tower == passage_tower else Role.QUERY][path]]
        elif "experts" in rest and by_role:
            values = [plain[Role.QUERY][path], plain[Role.PASSAGE][path]]
        else:
            values = [tied(path)]
        # A separate array for every parameter: towers and experts diverge in training.
        if "experts" in rest:
            return np.repeat(np.stack(values), experts.num_experts // len(values), axis=0)
        return np.array(values[0])

    return jax.tree_util.tree_map_with_path(choose, params)


def drawn_without(
    loaded: Params, initialise: Callable[[jax.Array], Params]
) -> Callable[[jax.Array], Params]:
    """`initialise` with zeros for what was read, until `place_pretrained` replaces them.

    Compiling the draws of a BERT of six blocks takes ten seconds.

    Args:
        loaded: from `read_pretrained`.
        initialise: key -> the model's parameters.
    """

    def draw(key: jax.Array) -> Params:
        return jax.tree.map(
            lambda read, drawn: jnp.zeros_like(drawn) if isinstance(read, np.ndarray) else drawn,
            loaded,
            initialise(key),
        )

    return draw


def place_pretrained(loaded: Params, *, params: Params) -> Params:
    """Replaces parameters by those read, on the same devices; the others stay.

    Args:
        loaded: from `read_pretrained`.
        params: the model's parameters, on their devices.
    """

    def place(read: object, drawn: jax.Array) -> jax.Array:
        if not isinstance(read, np.ndarray):
            return drawn
        return jax.make_array_from_callback(
            drawn.shape, drawn.sharding, lambda index: read[index].astype(drawn.dtype)
        )

    return jax.tree.map(place, loaded, params)


def check_words(checkpoint: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """Refuses texts that were tokenised otherwise than for the pretrained weights.

    Args:
        checkpoint: the weights' directory.
        vocabulary: what the texts were tokenised with, as a token store keeps it. If either has no
            tokenizer to compare, the log says so.

    Raises:
        ConfigError: words, or how texts are split into them, differ.
        DataError: the checkpoint's tokenizer is damaged or is not of its weights.
    """
    # Training imports no tokenizers unless its weights are pretrained.
    from taser_jax.data.text.vocabularies import load_vocabulary

    for directory in (checkpoint, vocabulary):
        if not any((directory / name).is_file() for name in _TOKENIZERS):
            logger.warning(
                "%s has no tokenizer: whether texts have the ids that the pretrained weights know "
                "was not checked",
                directory,
            )
            return
    used, pretrained = load_vocabulary(vocabulary), load_vocabulary(checkpoint)
    if _deciding(used) != _deciding(pretrained):
        raise ConfigError(
            f"the token store's vocabulary ({used.kind}) has other pieces, or splits texts "
            f"otherwise, than that of the weights ({pretrained.kind})",
            where=str(vocabulary),
            fix=f"tokenize with --gin.VOCABULARY={checkpoint}",
        )


def _deciding(vocabulary: Vocabulary) -> str | bytes:
    """What decides a text's ids: T5's extra ids, which follow the pieces, do not."""
    from taser_jax.data.text.vocabularies import SentencePieceVocabulary

    if isinstance(vocabulary, SentencePieceVocabulary):
        return vocabulary.content
    return vocabulary.fingerprint
