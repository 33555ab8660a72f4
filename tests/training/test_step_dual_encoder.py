"""Step, chunking and optimiser with the real dual encoders."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_encoder import BERT, adamw, make_batch, on_mesh

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.optim.optimizers import OptimizerConfig, learning_rate_factors
from taser_jax.training.losses import RoutingRegularizer
from taser_jax.training.objective import ObjectiveConfig
from taser_jax.training.step import make_train_step


def experts(routing, **kwargs):
    return ExpertConfig(num_experts=2, blocks=(1,), routing=routing, **kwargs)


SYSTEMS = {
    "dpr": DualEncoderConfig(BERT, towers=Towers.SEPARATE),
    "det-r": DualEncoderConfig(BERT, experts(Routing.DETERMINISTIC)),
    "seq-r": DualEncoderConfig(BERT, experts(Routing.SEQUENCE, gate_sharing=GateSharing.SHARED)),
    "tok-r": DualEncoderConfig(BERT, experts(Routing.TOKEN)),
}


def test_a_sharded_chunked_step_of_seq_r_moves_every_parameter():
    model = DualEncoder(SYSTEMS["seq-r"])
    optimizer = adamw(model, layer_decay=0.8)
    partitioner, state, shardings = on_mesh(model, optimizer, num_devices=2)
    before = jax.tree.map(np.asarray, state.params)
    step = make_train_step(
        model,
        optimizer,
        num_chunks=2,
        objective=ObjectiveConfig(regularizer=RoutingRegularizer()),
        state_shardings=shardings,
    )
    batch = jax.device_put(make_batch(16), partitioner.batch_sharding)
    losses = []
    for _ in range(4):
        state, metrics = step(state, {"nq": batch})
        losses.append(float(metrics["nll"]))
    assert step.compilations == 1
    assert not metrics["skipped_total"]
    assert min(losses[1:]) < losses[0]
    shares = [float(metrics[f"routing/query/expert_{expert}_share"]) for expert in (0, 1)]
    assert sum(shares) == pytest.approx(1.0)
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), before, state.params)
    still = [
        path
        for path, moves in leaves_by_path(moved).items()
        # Keys' biases cancel in the softmax: their gradient is rounding noise, or nothing.
        if not moves and not path.endswith("key/bias")
    ]
    assert still == []


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
