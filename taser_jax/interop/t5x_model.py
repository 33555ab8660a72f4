"""Our dual encoders as models of T5X: `python -m t5x.train --gin_file=t5x/taser.gin`.

T5X is imported here and nowhere else; install it from its source. What it trains are the very
parameters of `taser train`, under the same names: `taser train` and `taser import` start from its
checkpoints (PRETRAINED), and `t5x.write_t5x` makes checkpoints of ours that T5X starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import seqio
import tensorflow as tf
from flax.linen import partitioning
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int
from t5x import models

from taser_jax.data.token_store.negatives import read_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Batch, Encoded, EncoderInput, Role, TokenGroups, Tokens
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig
from taser_jax.models.parameters import init_params, logical_axes
from taser_jax.storage.errors import ConfigError

_FEATURES = ("inputs", "targets", "negative_targets")
_IDS_SPEC = seqio.FeatureConverter.FeatureSpec(dtype=tf.int32)
_IDS = seqio.PassThroughVocabulary(size=2**31 - 1)


Objective = Callable[[Encoded, Encoded, Batch], tuple[jax.Array, dict[str, jax.Array]]]
"""The loss of a batch's queries and passages, and metrics."""


class RetrievalFeatureConverter(seqio.FeatureConverter):
    """T5X's retrieval features as the arrays of `DualEncoderModel`.

    `inputs` is a query, `targets` its positive, and `negative_targets` its N hard negatives one
    after another, each padded to the length of `targets`; without any, leave the feature out of
    TASK_FEATURE_LENGTHS.

    Example:
        {"inputs": 32, "targets": 128, "negative_targets": 256}: N = 2, and a batch of 64 has
        queries [64, 32] and passages [64, 384].
    """

    TASK_FEATURES: ClassVar = dict.fromkeys(_FEATURES, _IDS_SPEC)
    MODEL_FEATURES: ClassVar = dict.fromkeys(("queries", "passages"), _IDS_SPEC)

    def _convert_features(
        self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
    ) -> tf.data.Dataset:
        def convert(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            passages = [features[name] for name in _FEATURES[1:] if name in features]
            return {"queries": features["inputs"], "passages": tf.concat(passages, 0)}

        padded = seqio.trim_and_pad_dataset(ds, task_feature_lengths)
        return padded.map(convert, num_parallel_calls=tf.data.AUTOTUNE)

    def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """Ids of a query, and of its passages together."""
        passages = task_feature_lengths["targets"] + task_feature_lengths.get("negative_targets", 0)
        return {"queries": task_feature_lengths["inputs"], "passages": passages}


class DualEncoderModel(models.BaseModel):
    """A dual encoder with our objective, for T5X's trainer.

    The loss is that of `taser train` on the same texts, but that other positives of a query cannot
    be told from negatives: T5X's features have one. Equal passages are told by their ids.

    Args:
        config: the dual encoder.
        optimizer_def: an optimiser of T5X.
        objective: `ObjectiveConfig`.
        batch_size: queries of the whole batch (BATCH_SIZE): all of its passages are negatives.
        passage_length: ids of a passage, the length of `targets`.
    """

    FEATURE_CONVERTER_CLS = RetrievalFeatureConverter

    def __init__(
        self,
        config: ModelConfig,
        optimizer_def: Any,
        objective: Objective,
        *,
        batch_size: int,
        passage_length: int,
    ) -> None:
        super().__init__(optimizer_def=optimizer_def)
        self._module = DualEncoder(config)
        self._batch_size, self._passage_length = batch_size, passage_length
        self._objective = objective

    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, tuple[int, ...]],
        input_types: Mapping[str, Any] | None = None,
    ) -> flax.core.FrozenDict:
        """Parameters, and the logical name of each axis in T5X's form."""
        del input_shapes, input_types
        params = init_params(self._module, rng)
        axes = {
            (*path[:-1], f"{path[-1]}_axes"): partitioning.AxisMetadata(names=tuple(names))
            for path, names in flatten_dict(logical_axes(self._module)).items()
        }
        return flax.core.freeze({"params": params, "params_axes": unflatten_dict(axes)})

    def loss_fn(
        self, params: Any, batch: Mapping[str, jnp.ndarray], dropout_rng: jax.Array | None
    ) -> tuple[Float[Array, ""], dict[str, clu.metrics.Metric]]:
        """The objective over all passages of the batch.

        Raises:
            ConfigError: microbatches, which would leave only their own passages as negatives.
        """
        size = batch["queries"].shape[0]
        if size != self._batch_size:
            raise ConfigError(
                f"a batch of {size} queries, where the model expects {self._batch_size}",
                where="DualEncoderModel.batch_size",
                fix="set it to BATCH_SIZE, and Trainer.num_microbatches to None: a microbatch's "
                "queries would have its own passages alone as negatives",
            )
        texts = self._batch(batch)
        queries = self._encode(params, texts.queries, Role.QUERY, dropout_rng)
        passages = self._encode(params, texts.passages, Role.PASSAGE, dropout_rng)
        loss, metrics = self._objective(queries, passages, texts)
        return loss, {
            name: clu.metrics.Average.from_model_output(jnp.asarray(value)[None])
            for name, value in {"loss": loss, **metrics}.items()
        }

    def predict_batch_with_aux(
        self, params: Any, batch: Mapping[str, jnp.ndarray], rng: jax.Array | None = None
    ) -> tuple[Float[Array, "batch dim"], dict[str, jnp.ndarray]]:
        """Embeddings of the queries."""
        del rng
        return self._encode(params, _tokens(batch["queries"]), Role.QUERY, None).embeddings, {}

    def score_batch(
        self, params: Any, batch: Mapping[str, jnp.ndarray], return_intermediates: bool = False
    ) -> Float[Array, " batch"]:
        """Score of each query with its positive."""
        del return_intermediates
        texts = self._batch(batch)
        queries = self._encode(params, texts.queries, Role.QUERY, None).embeddings
        passages = self._encode(params, texts.passages, Role.PASSAGE, None).embeddings
        return jnp.sum(queries * passages[texts.positive_index], axis=1)

    def _batch(self, batch: Mapping[str, jnp.ndarray]) -> Batch:
        size, length = batch["queries"].shape[0], self._passage_length
        passages = batch["passages"].reshape(size, -1, length).reshape(-1, length)
        positive_index = jnp.arange(size) * (len(passages) // size)
        # A passage that is a query's positive again is no negative of it.
        is_equal = (passages[positive_index][:, None] == passages).all(-1)
        is_another = jnp.arange(len(passages)) != positive_index[:, None]
        return Batch(
            queries=_tokens(batch["queries"]),
            passages=_tokens(passages),
            positive_index=positive_index,
            ignore=is_equal & is_another,
            query_rows=jnp.arange(size),
            passage_rows=jnp.arange(len(passages)),
        )

    def _encode(
        self,
        params: Any,
        tokens: EncoderInput | TokenGroups,
        role: Role,
        dropout_rng: jax.Array | None,
    ) -> Encoded:
        rngs = None
        if dropout_rng is not None:
            key = jax.random.fold_in(dropout_rng, list(Role).index(role))
            rngs = dict(zip(("dropout", "routing"), jax.random.split(key), strict=True))
        encoded = self._module.apply(
            {"params": params},
            tokens,
            role=role,
            train=dropout_rng is not None,
            rngs=rngs,
            method="encode",
        )
        assert isinstance(encoded, Encoded)
        return encoded


def axis_rules() -> list[tuple[str, str | None]]:
    """Rules of the axes that T5X's `standard_logical_axis_rules` lack (its `additional_rules`)."""
    return [("expert", None), ("length", None)]


def _tokens(ids: Int[Array, "texts length"]) -> Tokens:
    return Tokens(ids, ids != 0)


def add_t5x_task(
    name: str,
    *,
    token_store: str,
    task: str,
    split: str = "train",
    num_negatives: int = 1,
    negatives_dir: str | None = None,
) -> seqio.Task:
    """Registers a SeqIO task with T5X's retrieval features over a token store.

    A query comes with its first positive and its first hard negatives. TASK_FEATURE_LENGTHS are the
    store's: {"inputs": query length, "targets": passage length L, "negative_targets": N·L}.

    Args:
        name: of the SeqIO task, for MIXTURE_OR_TASK_NAME.
        token_store: written by `taser tokenize`.
        task: the store's task.
        split: its split, the only one of the SeqIO task.
        num_negatives: hard negatives of a query, N; 0 leaves `negative_targets` out.
        negatives_dir: of `taser mine`; None takes the hard negatives of the queries' source.

    Raises:
        ConfigError: a query has fewer hard negatives or no positive, or texts have the id 0, which
            is T5X's padding (RoBERTa's start).
    """
    store = TokenStore.open(token_store)
    queries = store.queries(task, split)
    where = f"{token_store}, task {task!r}, split {split!r}"
    if (queries.ids[:, :1] == 0).any():
        problem = "texts begin with id 0, which T5X takes for padding"
        raise ConfigError(problem, where=where, fix="train this model with `taser train`")
    if without := int((queries.positives.lengths == 0).sum()):
        problem = f"{without} of {len(queries)} queries have no positive"
        raise ConfigError(problem, where=where, fix="choose a split whose queries have one")
    hard: Sequence[np.ndarray] = list(queries.hard_negatives)
    if negatives_dir is not None:
        mined = read_negatives(negatives_dir, task, split, queries.query_ids)
        hard = [line.rows for line in mined]
    if short := sum(len(rows) < num_negatives for rows in hard):
        raise ConfigError(
            f"{short} of {len(hard)} queries have fewer than {num_negatives} hard negatives",
            where=f"{negatives_dir or token_store}, task {task!r}",
            fix="lower num_negatives, or mine deeper",
        )

    def examples(
        split: str, shuffle_files: bool = False, seed: int | None = None
    ) -> tf.data.Dataset:
        del split, shuffle_files, seed

        def rows() -> Iterator[dict[str, np.ndarray]]:
            for row, (positives, negatives) in enumerate(zip(queries.positives, hard, strict=True)):
                passages = np.concatenate([positives[:1], negatives[:num_negatives]])
                ids = np.asarray(store.passages.tokens(passages).ids)
                query = np.asarray(queries.ids[row], np.int32)
                yield dict(zip(features, (query, ids[0], ids[1:].reshape(-1)), strict=False))

        shapes = {each: tf.TensorSpec([None], tf.int32) for each in features}
        return tf.data.Dataset.from_generator(rows, output_signature=shapes)

    features = _FEATURES if num_negatives else _FEATURES[:-1]
    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            examples, splits=(split,), num_input_examples={split: len(queries)}
        ),
        preprocessors=[],
        output_features={
            each: seqio.Feature(_IDS, add_eos=False, dtype=tf.int32) for each in features
        },
    )
