"""DPR-MUF's ensemble: small networks on query embeddings, their training step, inputs and files.

A member's parameters are {"layers_0": {"kernel": [in, out], "bias": [out]}, ...}; those of an
ensemble have a leading axis of members.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int
from msgspec import Meta

from taser_jax.assembly.data import training_queries
from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig, prefetch
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Array
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Checked, Positive, Seed
from taser_jax.training.objective import ContrastiveLoss, StepMetrics, contrastive_loss
from taser_jax.training.state import Params, SkippedSteps, TrainState, named_key, named_seed
from taser_jax.training.step import apply_gradients

MEMBER = "member"


@dataclasses.dataclass(frozen=True)
class EnsembleConfig(Checked):
    """Sizes of an ensemble.

    Attributes:
        members: networks that differ in initialisation, order of queries and sub-batches; fewer
            cost less and say less.
        hidden_dims: widths of the hidden layers, each followed by a ReLU. The released code has
            two of 512; the paper's "2-layer" network, taken literally, has one.
    """

    RANGE_FIX: ClassVar[str] = "set two members or more (one cannot disagree), and positive widths"

    members: Annotated[int, Meta(ge=2)] = 20
    hidden_dims: tuple[Positive, ...] = (512, 512)

    def layer_dims(self, dim: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each layer, for embeddings of `dim` numbers."""
        return tuple(itertools.pairwise((dim, *self.hidden_dims, dim)))

    def parameters(self, dim: int) -> int:
        """Parameters of one member."""
        return sum(inputs * outputs + outputs for inputs, outputs in self.layer_dims(dim))

    def training_flops(self, dim: int, *, queries: int, passages: int) -> float:
        """Matrix-product FLOPs of one member's step: forward, and twice that backward."""
        products = sum(inputs * outputs for inputs, outputs in self.layer_dims(dim))
        return 6.0 * queries * (products + passages * dim)


def init_members(key: jax.Array, *, dim: int, config: EnsembleConfig, members: int) -> Params:
    """Parameters of the first members of an ensemble; member i's depend on the key and i alone.

    Weights and biases are drawn from U(−1/√in, 1/√in), PyTorch's default for linear layers.

    Args:
        key: key of the whole ensemble.
        dim: width of the embeddings.
        config: sizes; its own number of members is not used.
        members: how many.
    """

    def layer(key: jax.Array, inputs: int, outputs: int) -> Params:
        bound = 1 / math.sqrt(inputs)
        kernel, bias = jax.random.split(key)
        return {
            "kernel": jax.random.uniform(kernel, (inputs, outputs), minval=-bound, maxval=bound),
            "bias": jax.random.uniform(bias, (outputs,), minval=-bound, maxval=bound),
        }

    def member(number: Array) -> Params:
        own = jax.random.fold_in(key, number)
        return {
            f"layers_{place}": layer(jax.random.fold_in(own, place), *sizes)
            for place, sizes in enumerate(config.layer_dims(dim))
        }

    return jax.vmap(member)(jnp.arange(members))


def apply_member(
    params: Params, queries: Float[Array, "queries dim"]
) -> Float[jax.Array, "queries dim"]:
    """U = f(v): linear layers with ReLUs between them; no residual, dropout or normalisation.

    Products are float32 at `Precision.HIGHEST`: at a low temperature, the rounding of TPUs
    would look like disagreement.
    """
    hidden = jnp.asarray(queries, jnp.float32)
    for place in range(len(params)):
        layer = params[f"layers_{place}"]
        product = jnp.matmul(hidden, layer["kernel"], precision=jax.lax.Precision.HIGHEST)
        hidden = product + layer["bias"]
        if place < len(params) - 1:
            hidden = jax.nn.relu(hidden)
    return hidden


@jax.jit
def apply_members(
    params: Params, queries: Float[Array, "queries dim"]
) -> Float[jax.Array, "members queries dim"]:
    """Every member's embeddings of the same queries."""
    return jax.vmap(apply_member, in_axes=(0, None))(params, queries)


# As in `batch`: JAX also builds this tree with leaves that are no arrays.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleBatch:
    """Every member's batch of one step, as the specialist's embeddings; `vmap` removes axis 0.

    Attributes:
        queries: query embeddings. [members, batch, dim]
        passages: passage embeddings, as a `Batch` orders its passages. [members, passages, dim]
        positive_index: row of each query's positive among `passages`. [members, batch]
        ignore: True where a passage is no negative of the query. [members, batch, passages]
    """

    queries: Float[Array, "members batch dim"]
    passages: Float[Array, "members passages dim"]
    positive_index: Int[Array, "members batch"]
    ignore: Bool[Array, "members batch passages"]


@dataclasses.dataclass(frozen=True)
class MemberPlacement:
    """Members split over devices: each device holds equally many and computes them by itself.

    If the number of devices does not divide that of the members, additional members are trained and
    dropped. No member depends on how many there are, and none is copied.

    Attributes:
        mesh: devices along the axis "member".
        members: number of members of the ensemble.
    """

    mesh: Mesh
    members: int

    @classmethod
    def over(cls, devices: list[jax.Device], members: int) -> MemberPlacement:
        """A placement on these devices, of which at most one per member is used."""
        return cls(Mesh(np.array(devices[: max(1, members)]), (MEMBER,)), members)

    @property
    def padded(self) -> int:
        """Number of members that are trained: a multiple of the number of devices."""
        return -(-self.members // self.mesh.size) * self.mesh.size

    @property
    def split(self) -> NamedSharding:
        """Sharding that splits the first axis over the devices."""
        return NamedSharding(self.mesh, PartitionSpec(MEMBER))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding with a copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def state(self) -> TrainState:
        """Shardings of a state, as a prefix of its tree: everything but the step is split."""
        split = self.split
        skipped = SkippedSteps(split, split)
        return TrainState(self.replicated, params=split, opt_state=split, skipped=skipped)


def init_ensemble_state(
    init: Callable[[jax.Array], Params],
    optimizer: optax.GradientTransformation,
    seed: int,
    placement: MemberPlacement,
) -> TrainState:
    """A fresh state, computed where it will live; each member has its own optimiser state.

    Args:
        init: key -> parameters with a leading axis of `placement.padded` members.
        optimizer: the chain of one member.
        seed: seed of the initial weights.
        placement: members over devices.
    """

    def create(key: jax.Array) -> TrainState:
        params = init(key)
        zeros = jnp.zeros(placement.padded, jnp.int32)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=jax.vmap(optimizer.init)(params),
            skipped=SkippedSteps(zeros, zeros),
        )

    return jax.jit(create, out_shardings=placement.state)(named_key(seed, "ensemble"))


def make_ensemble_step(
    optimizer: optax.GradientTransformation, placement: MemberPlacement
) -> Callable[[TrainState, EnsembleBatch], tuple[TrainState, StepMetrics]]:
    """The jitted step of all members; the state is donated.

    Each member minimises the contrastive loss of its own batch; negatives stay inside it. Its
    gradient is clipped and checked by itself, so that member i is the same in every ensemble. (The
    mean over members that DPR-MUF's code minimises has 1/members of these gradients; AdamW does
    not see the factor, clipping would.)

    Args:
        optimizer: the chain of one member.
        placement: members over devices.

    Returns:
        A function of state and batches that returns the next state and the metrics. Means over
        members are `loss`, `nll`, `accuracy`, `grad_norm`, `param_norm` and `skipped`;
        `skipped_in_a_row` and `skipped_total` are those of the member with the most.
    """

    def member(state: TrainState, batch: EnsembleBatch) -> tuple[TrainState, StepMetrics]:
        def loss_fn(params: Params) -> tuple[jax.Array, StepMetrics]:
            result = _loss(params, batch)
            return result.loss, {
                "loss": result.loss,
                "nll": result.loss,
                "accuracy": result.accuracy,
            }

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state, update, _ = apply_gradients(
            state,
            grads,
            optimizer=optimizer,
            losses=loss[None],
            squared_norms=jnp.square(optax.global_norm(grads))[None],
            key=jax.random.fold_in(named_key(0, "optimizer"), state.step),
        )
        return state, metrics | update

    def train_step(state: TrainState, batch: EnsembleBatch) -> tuple[TrainState, StepMetrics]:
        axes = TrainState(step=None, params=0, opt_state=0, skipped=SkippedSteps(0, 0))
        new_state, by_member = jax.vmap(
            member, in_axes=(axes, 0), out_axes=(dataclasses.replace(axes, step=0), 0)
        )(state, batch)
        own = {name: values[: placement.members] for name, values in by_member.items()}
        metrics = {name: jnp.mean(values) for name, values in own.items()}
        # The member with the most skipped steps decides whether training continues.
        metrics |= {name: jnp.max(own[name]) for name in ("skipped_in_a_row", "skipped_total")}
        return dataclasses.replace(new_state, step=state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(placement.state, None))


def make_ensemble_eval(members: int) -> Callable[[Params, EnsembleBatch], Float[Array, " members"]]:
    """The jitted loss of every member on one and the same batch.

    Args:
        members: number of members of the ensemble; additional ones are left out.
    """

    def member(params: Params, batch: EnsembleBatch) -> jax.Array:
        return _loss(params, batch).loss

    return jax.jit(
        lambda params, batch: jax.vmap(member, in_axes=(0, None))(params, batch)[:members]
    )


def _loss(params: Params, batch: EnsembleBatch) -> ContrastiveLoss:
    """The contrastive loss of one member on its batch."""
    return contrastive_loss(
        apply_member(params, batch.queries),
        jnp.asarray(batch.passages),
        positive_index=jnp.asarray(batch.positive_index),
        ignore=jnp.asarray(batch.ignore),
    )


KIND = "ensemble"
_VERSION = 1
_MEMBERS = "members.npz"


class _Metadata(artifacts.Metadata, frozen=True):
    members: Positive
    hidden_dims: tuple[Positive, ...]
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class EnsembleTraining(Checked):
    """How an ensemble is trained; the defaults are DPR-MUF's.

    Attributes:
        model: sizes.
        batching: queries in a member's batch, and its hard negatives.
        optimizer: optimiser of each member. Its warm-up is at most a tenth of the run.
        epochs: passes of each member over the specialist's training queries.
        evaluations: number of validations, and of checkpoints, in the whole run; the checkpoint of
            the lowest loss is kept, so that with one it is the last.
        seed: seed of weights and batches.
    """

    model: EnsembleConfig = EnsembleConfig()
    batching: BatchingConfig = BatchingConfig(batch_size=128)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, warmup_steps=1237)
    epochs: Positive = 100
    evaluations: Positive = 20
    seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class SpecialistVectors:
    """A specialist's frozen vectors of some queries and all passages.

    Attributes:
        passages: its passage embeddings, memory-mapped.
        queries: task -> embeddings of its queries, in the order of `tokenized`.
        tokenized: task -> positives and hard negatives of these queries.
    """

    passages: Embeddings
    queries: Mapping[str, Float[np.ndarray, "queries dim"]]
    tokenized: Mapping[str, TokenizedQueries]

    @classmethod
    def read(
        cls,
        embeddings_dir: artifacts.FilePath,
        store: TokenStore,
        *,
        tasks: Sequence[str],
        split: str,
        negatives_dirs: Sequence[str] = (),
    ) -> SpecialistVectors:
        """Opens the embeddings of these tasks' split, without queries that have no positive.

        Raises:
            ConfigError: the token store has no such task or split.
            DataError: it is not encoded, or no query has a positive.
            FingerprintError: the embeddings are of another model, collection or token store.
        """
        passages = Embeddings(
            embeddings_dir, fingerprints={"passages": store.metadata.passages_fingerprint}
        )
        vectors, tokenized = {}, {}
        for task in tasks:
            expected = {**passages.fingerprints, "queries": store.queries(task, split).fingerprint}
            encoded = QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=expected)
            queries = training_queries(
                store, task_names=[task], negatives_dirs=negatives_dirs, split=split
            )[task]
            with_positive = np.flatnonzero(queries.positives.lengths)
            if not len(with_positive):
                where = f"task {task!r}, split {split!r}"
                title = f"none of {len(queries)} queries has a positive to train the ensemble with"
                raise DataError(title, where=where, fix="leave the task out")
            tokenized[task] = queries_of(queries, with_positive)
            row_of = {query_id: row for row, query_id in enumerate(encoded.query_ids)}
            rows = np.array([row_of[query_id] for query_id in tokenized[task].query_ids])
            vectors[task] = np.asarray(encoded.take(rows), np.float32)
        return cls(passages, vectors, tokenized)

    def stream(self, store: TokenStore, batching: BatchingConfig) -> BatchStream:
        """Rows of batches of these queries."""
        return BatchStream(store, self.tokenized, batching)

    def batch(self, streams: Sequence[BatchStream], step: int) -> EnsembleBatch:
        """One batch of each stream, as vectors, with a leading axis of streams."""
        rows = [stream.rows(step) for stream in streams]
        passages = self.passages.take(np.concatenate([batch.passage_rows for batch in rows]))
        return EnsembleBatch(
            queries=np.stack([self.queries[batch.task][batch.query_rows] for batch in rows]),
            passages=passages.reshape(len(rows), -1, passages.shape[1]),
            positive_index=np.stack([batch.positive_index for batch in rows]),
            ignore=np.stack([batch.ignore for batch in rows]),
        )


class EnsembleBatches:
    """Every member's batches, gathered ahead in a thread and placed on the devices.

    Args:
        vectors: the specialist's vectors.
        stream: rows of batches; each member reseeds it.
        placement: members over devices; a host gathers batches for the members on its own.
        seed: the ensemble's seed.
    """

    def __init__(
        self,
        vectors: SpecialistVectors,
        stream: BatchStream,
        placement: MemberPlacement,
        *,
        seed: int,
    ) -> None:
        self._vectors, self._split = vectors, placement.split
        parts = self._split.addressable_devices_indices_map((placement.padded,)).values()
        here = sorted(
            member for part in parts if part for member in range(placement.padded)[part[0]]
        )
        self._streams = [stream.reseeded(named_seed(seed, f"member {member}")) for member in here]
        self._members = placement.padded

    def iterate(self, start_step: int, stop_step: int) -> Iterator[tuple[int, EnsembleBatch]]:
        """Batches on the devices, for steps start_step .. stop_step - 1."""
        return prefetch(self._make, start_step, stop_step, self._put)

    def describe(self, step: int) -> str:
        """Task and first query ids of the first member's batch."""
        rows = self._streams[0].rows(step)
        ids = self._vectors.tokenized[rows.task].query_ids
        shown = ", ".join(repr(ids[row]) for row in rows.query_rows[:4])
        return f"the first member's task {rows.task!r}, queries {shown}, ..."

    def _make(self, step: int) -> EnsembleBatch:
        return self._vectors.batch(self._streams, step)

    def _put(self, batch: EnsembleBatch) -> EnsembleBatch:
        def put(array: np.ndarray) -> jax.Array:
            shape = (self._members, *array.shape[1:])
            return jax.make_array_from_process_local_data(self._split, array, shape)

        return jax.tree.map(put, batch)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """A trained ensemble.

    Attributes:
        config: sizes.
        params: arrays with a leading axis of members.
        fingerprints: fingerprints of the specialist's model, collection, vocabulary and passages,
            and of the ensemble itself ("ensemble").
        tasks: tasks whose queries it was trained on.
    """

    config: EnsembleConfig
    params: Params
    fingerprints: Mapping[str, str]
    tasks: tuple[str, ...]

    @property
    def member_parameters(self) -> int:
        """Parameters of one member."""
        return sum(leaf[0].size for leaf in jax.tree.leaves(self.params))

    def embed(self, queries: Float[np.ndarray, "queries dim"]) -> jax.Array:
        """Every member's embeddings of a specialist's query embeddings: [members, queries, dim]."""
        return apply_members(self.params, queries)

    def first(self, members: int) -> Ensemble:
        """The ensemble of the first members, equal to one trained with that many.

        Raises:
            ConfigError: it has fewer.
        """
        if not 2 <= members <= self.config.members:
            title = f"{members} members of an ensemble of {self.config.members}"
            fix = f"take 2 to {self.config.members}, or train a larger ensemble"
            raise ConfigError(title, where="Specialist.members", fix=fix)
        params = jax.tree.map(lambda leaf: leaf[:members], self.params)
        total = artifacts.fingerprint_json([self.fingerprints["ensemble"], members])
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, members=members),
            params=params,
            fingerprints={**self.fingerprints, "ensemble": total},
        )

    def save(self, directory: artifacts.FilePath, *, facts: Mapping[str, object]) -> None:
        """Writes members.npz and, last, metadata.json.

        Args:
            directory: where it goes.
            facts: facts about its training; JSON-able.
        """
        directory = pathlib.Path(directory)
        arrays = flatten_dict(self.params, sep="/")
        with artifacts.replacing(directory / _MEMBERS) as scratch, open(scratch, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        artifacts.write_json(
            directory / artifacts.METADATA,
            {
                "format_version": _VERSION,
                "kind": KIND,
                "members": self.config.members,
                "hidden_dims": list(self.config.hidden_dims),
                "tasks": list(self.tasks),
                "fingerprints": dict(self.fingerprints),
                **facts,
            },
        )

    @classmethod
    def open(
        cls, directory: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
    ) -> Ensemble:
        """Opens a finished ensemble.

        Args:
            directory: what `taser ensemble` wrote.
            fingerprints: required fingerprints of the embeddings it was trained on.

        Raises:
            DataError: none is there, or its arrays are damaged.
            FingerprintError: it belongs to another model or collection.
        """
        fix = "train an ensemble on this model's embeddings (`taser ensemble`), or correct the path"
        metadata = artifacts.read_metadata(
            directory, KIND, _VERSION, _Metadata, fingerprints=fingerprints, fix=fix
        )
        path = pathlib.Path(directory) / _MEMBERS
        try:
            with np.load(path) as arrays:
                params = unflatten_dict(dict(arrays), sep="/")
        except artifacts.ARRAY_ERRORS as error:
            fix = "run `taser ensemble` again: it writes them from its checkpoints"
            raise DataError(f"missing or damaged: {error}", where=str(path), fix=fix) from error
        config = EnsembleConfig(metadata.members, metadata.hidden_dims)
        return cls(config, params, metadata.fingerprints, metadata.tasks)
