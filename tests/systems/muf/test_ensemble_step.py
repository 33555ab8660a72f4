"""The step of all members: PyTorch's, member by member, on one device or eight."""

import functools
import unittest.mock

import jax
import numpy as np
import optax
import pytest
from tiny_models import assert_close

from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.members import (
    EnsembleBatch,
    EnsembleConfig,
    MemberPlacement,
    init_ensemble_state,
    init_members,
    make_ensemble_step,
)

DIM, BATCH, STEPS, RATE = 6, 5, 4, 1e-2
# Large, or Adam would make steps of the rounding errors of gradients near 0.
EPSILON = 1e-3
CONFIG = EnsembleConfig(members=3, hidden_dims=(7, 5))


def batches(members, step):
    """Large enough that gradients are clipped."""
    rng = [np.random.default_rng([step, member]) for member in range(members)]
    drawn = np.float32([8 * generator.normal(size=(3 * BATCH, DIM)) for generator in rng])
    positives = np.tile(2 * np.arange(BATCH, dtype=np.int32), (members, 1))
    ignore = np.zeros((members, BATCH, 2 * BATCH), bool)
    ignore[:, 0, 3] = True
    return EnsembleBatch(drawn[:, :BATCH], drawn[:, BATCH:], positives, ignore)


@functools.cache
def program(devices, members=CONFIG.members):
    placement = MemberPlacement.over(jax.devices()[:devices], members)
    init = functools.partial(init_members, dim=DIM, config=CONFIG, members=placement.padded)
    shapes = jax.eval_shape(
        lambda key: jax.tree.map(lambda leaf: leaf[0], init(key)), jax.random.key(0)
    )
    adam = functools.partial(optax.scale_by_adam, eps=EPSILON)
    with unittest.mock.patch.object(optax, "scale_by_adam", adam):
        config = OptimizerConfig(learning_rate=RATE, warmup_steps=1)
        optimizer = build_optimizer(config, shapes, total_steps=STEPS)
    state = init_ensemble_state(init, optimizer, 0, placement)
    return placement, state, make_ensemble_step(optimizer, placement)


def trained(devices, members=CONFIG.members, change=lambda batch: batch):
    placement, state, step = program(devices, members)
    state, history = jax.tree.map(lambda leaf: leaf.copy(), state), []
    for number in range(STEPS):
        batch = jax.device_put(change(batches(placement.padded, number)), placement.split)
        state, metrics = step(state, batch)
        history.append(metrics)
    return placement, state, history


def leaves(state, members=CONFIG.members):
    return [np.asarray(leaf)[:members] for leaf in jax.tree.leaves(state.params)]


def test_equals_pytorch():
    import torch

    _, state, history = trained(1)
    _, start, _ = program(1)
    losses = np.zeros((STEPS, CONFIG.members))
    for member in range(CONFIG.members):
        layers = []
        for place, (inputs, outputs) in enumerate(CONFIG.layer_dims(DIM)):
            layer = torch.nn.Linear(inputs, outputs)
            leaf = start.params[f"layers_{place}"]
            layer.weight.data = torch.tensor(np.asarray(leaf["kernel"][member]).T.copy())
            layer.bias.data = torch.tensor(np.asarray(leaf["bias"][member]))
            layers += [layer, torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers[:-1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=EPSILON)
        for number, factor in enumerate([0.0, 1.0, 2 / 3, 1 / 3]):
            batch = batches(CONFIG.members, number)
            queries, passages = map(torch.tensor, (batch.queries[member], batch.passages[member]))
            logits = model(queries) @ passages.T
            logits = logits.masked_fill(torch.tensor(batch.ignore[member]), -torch.inf)
            positives = torch.tensor(batch.positive_index[member]).long()
            loss = torch.nn.functional.cross_entropy(logits, positives)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            assert norm > 2.0
            optimizer.param_groups[0]["lr"] = RATE * factor
            optimizer.step()
            losses[number, member] = loss.item()
        for place, layer in enumerate(model[::2]):
            leaf = state.params[f"layers_{place}"]
            weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
            np.testing.assert_allclose(leaf["kernel"][member], weight.T, atol=1e-5)
            np.testing.assert_allclose(leaf["bias"][member], bias, atol=1e-5)
    means = [float(metrics["loss"]) for metrics in history]
    np.testing.assert_allclose(means, losses.mean(axis=1), rtol=1e-5)


# No more devices than members; two devices train a fourth one, which is dropped.
@pytest.mark.parametrize(("devices", "used", "padded"), [(8, 3, 3), (2, 2, 4)])
def test_several_devices_give_what_one_gives_and_split_the_members(devices, used, padded):
    placement, state, history = trained(devices)
    assert (placement.mesh.size, placement.padded) == (used, padded)
    _, alone, expected = trained(1)
    assert_close(leaves(state), leaves(alone), rtol=1e-6)
    for name, value in expected[-1].items():
        assert float(history[-1][name]) == pytest.approx(float(value), rel=1e-5), name
    kernel = state.params["layers_0"]["kernel"]
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {padded // used}


def test_a_member_does_not_depend_on_their_number():
    _, few, _ = trained(1, 3)
    _, many, _ = trained(1, 5)
    assert_close(leaves(few), leaves(many), rtol=1e-6)


def test_a_member_that_breaks_is_skipped_and_spoils_no_other():
    def spoil(batch):
        batch.queries[1] = np.inf
        return batch

    _, state, history = trained(1, change=spoil)
    assert [float(metrics["skipped_in_a_row"]) for metrics in history] == [1, 2, 3, 4]
    assert state.skipped.total.tolist() == [0, 4, 0]
    _, healthy, _ = trained(1)
    for left, right in zip(leaves(state), leaves(healthy), strict=True):
        np.testing.assert_allclose(left[[0, 2]], right[[0, 2]], atol=1e-6)
        assert np.isfinite(left[1]).all()


def test_the_step_moves_no_vectors_between_devices():
    placement, state, step = program(8)
    batch = jax.device_put(batches(placement.padded, 0), placement.split)
    text = step.lower(state, batch).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    # Metrics, whose mean is over members, and nothing with the shape of a layer or a vector.
    assert reduced
    assert not any("f32[3," in line or f",{DIM}]" in line for line in reduced), reduced


def test_parameters_of_the_papers_ensemble():
    # 768·512 + 512 + 512·512 + 512 + 512·768 + 768
    assert EnsembleConfig().parameters(768) == 1_050_368
    _, state, _ = program(1)
    assert sum(leaf.size for leaf in leaves(state)) == CONFIG.members * CONFIG.parameters(DIM)


def test_weights_are_drawn_as_pytorch_draws_them():
    config = EnsembleConfig(hidden_dims=(256,))
    wide = init_members(jax.random.key(0), dim=64, config=config, members=4)
    for layer, inputs in (("layers_0", 64), ("layers_1", 256)):
        bound = inputs**-0.5
        for leaf in wide[layer].values():
            values = np.asarray(leaf)
            assert np.abs(values).max() <= bound
            # A uniform distribution's standard deviation.
            assert values.std() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_an_ensemble_has_two_members_at_least():
    with pytest.raises(ConfigError, match="two members or more"):
        EnsembleConfig(members=1)
    with pytest.raises(ConfigError, match="positive widths"):
        EnsembleConfig(hidden_dims=(0,))
