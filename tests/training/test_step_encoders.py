"""Step, chunking and optimiser with the real dual encoders."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_encoder import BERT, on_mesh
from tiny_models import assert_close, tiny_batch

from taser_jax.devices.mesh import MeshConfig
from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import abstract_params, init_params
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.optim.optimizers import OptimizerConfig, learning_rate_factors
from taser_jax.storage.errors import ConfigError
from taser_jax.training.multitask_step import TaskGradients, make_multitask_step
from taser_jax.training.state import init_state


def experts(routing, **kwargs):
    return ExpertConfig(num_experts=2, blocks=(1,), routing=routing, **kwargs)


SYSTEMS = {
    "dpr": DualEncoderConfig(BERT, towers=Towers.SEPARATE),
    "det-r": DualEncoderConfig(BERT, experts(Routing.DETERMINISTIC)),
    "seq-r": DualEncoderConfig(BERT, experts(Routing.SEQUENCE, gate_sharing=GateSharing.SHARED)),
    "tok-r": DualEncoderConfig(BERT, experts(Routing.TOKEN)),
}


QUERY_TOWERS = {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever", "wow")}
BATCH = tiny_batch(16)


def moved_leaves(before, after):
    """Whether each parameter has changed, by its path."""
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), before, after)
    return leaves_by_path(moved)


def moved_towers(before, after):
    return {path.split("/")[0] for path, moved in moved_leaves(before, after).items() if moved}


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_tasers_layer_decay_covers_every_parameter_of_bert_base(system):
    small = SYSTEMS[system]
    base = BertConfig(
        vocab_size=30522, embed_dim=768, num_layers=12, num_heads=12, head_dim=64, mlp_dim=3072
    )
    model = DualEncoder(
        dataclasses.replace(
            small, bert=base, experts=dataclasses.replace(small.experts, blocks=None)
        )
    )
    params = abstract_params(model)
    tree = learning_rate_factors(OptimizerConfig(layer_decay=0.8), params)
    factors = leaves_by_path(tree)
    tower = "query_encoder" if system == "dpr" else "encoder"
    # TASER's code, as printed in its log: x0.044, x0.055, x0.64, gate x0.262.
    assert factors[f"{tower}/embeddings/token/embedding"] == pytest.approx(0.044, abs=5e-4)
    assert factors[f"{tower}/layers_0/mlp/wi/kernel"] == pytest.approx(0.055, abs=5e-4)
    last = "mlp" if system == "dpr" else "experts"
    assert factors[f"{tower}/layers_11/{last}/wi/kernel"] == pytest.approx(0.64)
    shared_gate = [factor for path, factor in factors.items() if path.endswith("r/router/kernel")]
    assert len(shared_gate) == (1 if system == "seq-r" else 0)
    assert shared_gate == pytest.approx([0.262] * len(shared_gate), abs=5e-4)
    assert jnp.all(jnp.array(list(factors.values())) < 1)


MODEL = DualEncoder(DualEncoderConfig(bert=BERT, **QUERY_TOWERS))


@pytest.mark.slow
def test_a_sharded_multitask_step_is_the_unsharded_one():
    """Of two tasks out of three: the third's tower stays; on 8 devices and on one."""
    batches = {"nq": BATCH, "fever": tiny_batch(8, length=9, seed=2)}
    # No Adam: its first step is the gradient's sign, also where that is rounding noise.
    optimizer = optax.sgd(0.1)
    make_step = functools.partial(
        make_multitask_step, MODEL, optimizer, tasks=("nq", "fever"), gradients=TaskGradients.SUMMED
    )
    state = init_state(functools.partial(init_params, MODEL), optimizer, jax.random.key(0))
    before = numpy(state.params)
    alone, metrics = make_step()(state, batches)
    towers = {"query_encoder_nq", "query_encoder_fever", "passage_encoder"}
    assert moved_towers(before, alone.params) == towers

    partitioner, state, shardings = on_mesh(MODEL, optimizer, MeshConfig(data=2, fsdp=2, model=2))
    placed = {task: jax.device_put(b, partitioner.batch_sharding) for task, b in batches.items()}
    sharded, sharded_metrics = make_step(state_shardings=shardings)(state, placed)
    for name in ("loss", "grad_norm/nq", "grad_norm/fever"):
        assert float(sharded_metrics[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    assert_close(sharded.params, numpy(alone.params))
    unknown = {"hotpot": BATCH, "nq": BATCH}
    with pytest.raises(ConfigError, match="of task 'hotpot'"):
        make_step(tasks=tuple(unknown))(alone, unknown)
