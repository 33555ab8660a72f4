"""One training step of all members of an ensemble, each on its own batch, by `vmap`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from taser_jax.models.batch import Array
from taser_jax.training.keys import named_key
from taser_jax.training.losses import ContrastiveLoss, contrastive_loss
from taser_jax.training.objective import StepMetrics
from taser_jax.training.state import Params, SkippedSteps, TrainState
from taser_jax.training.step import apply_gradients

MEMBER = "member"

Apply = Callable[[Params, jax.Array], jax.Array]
"""(a member's parameters, query embeddings [queries, dim]) -> its embeddings, [queries, dim]."""


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


def member_seed(seed: int, member: int) -> int:
    """The seed of one member's batches."""
    digest = hashlib.sha256(f"{seed} member {member}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


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
    apply: Apply, optimizer: optax.GradientTransformation, placement: MemberPlacement
) -> Callable[[TrainState, EnsembleBatch], tuple[TrainState, StepMetrics]]:
    """The jitted step of all members; the state is donated.

    Each member minimises the contrastive loss of its own batch; negatives stay inside it. Its
    gradient is clipped and checked by itself, so that member i is the same in every ensemble. (The
    mean over members that DPR-MUF's code minimises has 1/members of these gradients; AdamW does
    not see the factor, clipping would.)

    Args:
        apply: one member.
        optimizer: the chain of one member.
        placement: members over devices.

    Returns:
        A function of state and batches that returns the next state and the metrics. Means over
        members are `loss`, `nll`, `accuracy`, `grad_norm`, `param_norm` and `skipped`;
        `skipped_in_a_row` and `skipped_total` are those of the member with the most.
    """

    def member(state: TrainState, batch: EnsembleBatch) -> tuple[TrainState, StepMetrics]:
        def loss_fn(params: Params) -> tuple[jax.Array, StepMetrics]:
            found = _loss(apply(params, jnp.asarray(batch.queries)), batch)
            metrics = {"loss": found.loss, "nll": found.loss, "accuracy": found.accuracy}
            return found.loss, metrics

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
        new_state, found = jax.vmap(
            member, in_axes=(axes, 0), out_axes=(dataclasses.replace(axes, step=0), 0)
        )(state, batch)
        kept = {name: values[: placement.members] for name, values in found.items()}
        metrics = {name: jnp.mean(values) for name, values in kept.items()}
        # The member with the most skipped steps decides whether training continues.
        metrics |= {name: jnp.max(kept[name]) for name in ("skipped_in_a_row", "skipped_total")}
        return dataclasses.replace(new_state, step=state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(placement.state, None))


def make_ensemble_eval(
    apply: Apply, members: int
) -> Callable[[Params, EnsembleBatch], Float[Array, " members"]]:
    """The jitted loss of every member on one and the same batch.

    Args:
        apply: one member.
        members: number of members of the ensemble; additional ones are left out.
    """

    def member(params: Params, batch: EnsembleBatch) -> jax.Array:
        return _loss(apply(params, jnp.asarray(batch.queries)), batch).loss

    return jax.jit(
        lambda params, batch: jax.vmap(member, in_axes=(0, None))(params, batch)[:members]
    )


def _loss(embeddings: jax.Array, batch: EnsembleBatch) -> ContrastiveLoss:
    """The contrastive loss of one member on its batch."""
    return contrastive_loss(
        embeddings,
        jnp.asarray(batch.passages),
        positive_index=jnp.asarray(batch.positive_index),
        ignore=jnp.asarray(batch.ignore),
    )
