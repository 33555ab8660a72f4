"""DPR-MUF's ensemble: small networks on query embeddings, and the training step of all of them.

A member's parameters are {"layers_0": {"kernel": [in, out], "bias": [out]}, ...}; those of an
ensemble have a leading axis of members.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Annotated, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int
from msgspec import Meta

from taser_jax.models.batch import Array
from taser_jax.storage.typed_files import Checked, Positive
from taser_jax.training.losses import ContrastiveLoss, contrastive_loss
from taser_jax.training.objective import StepMetrics
from taser_jax.training.state import Params, SkippedSteps, TrainState, named_key
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
