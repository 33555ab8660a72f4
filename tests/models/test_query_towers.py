"""BERT encoders with a query tower for each task (TACO-DR's QSpec)."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import encode, random_params, tiny_bert, tiny_model, tiny_tokens

from taser_jax.interop.bert import from_plain_encoders, plain_encoder
from taser_jax.models.batch import BatchShape, Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import abstract_params, init_params, logical_axes, parameter_count
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.storage.errors import ConfigError

TASKS = {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")}
TOWERS = ("query_encoder_nq", "query_encoder_fever", "passage_encoder")
LEARNED = ExpertConfig(num_experts=2, routing=Routing.SEQUENCE, blocks=(1,))


def one_block():
    return tiny_bert(num_layers=1)


def q_spec(**changes):
    return DualEncoder(DualEncoderConfig(bert=one_block(), **TASKS, **changes))


@pytest.mark.parametrize("experts", [ExpertConfig(), LEARNED])
def test_copies_of_one_tower_embed_as_the_tied_model_does(experts):
    config = DualEncoderConfig(bert=one_block(), experts=experts, pooling=Pooling.MEAN)
    tied = DualEncoder(config)
    model = DualEncoder(dataclasses.replace(config, **TASKS))
    encoder = random_params(tied)["encoder"]
    copies = dict.fromkeys(TOWERS, encoder)
    for role in Role:
        for task in ("nq", "fever"):
            found = encode(model, copies, tiny_tokens(), role, task=task)
            expected = encode(tied, {"encoder": encoder}, tiny_tokens(), role)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_tasks_queries_train_their_own_tower_and_passages_one():
    model = q_spec()
    params = random_params(model)

    def trained(role, task):
        def total(p):
            return encode(model, p, tiny_tokens(), role, task=task).embeddings[:, 0].sum()

        found = jax.jit(jax.grad(total))(params)
        return {n for n, tree in found.items() if any(x.any() for x in jax.tree.leaves(tree))}

    assert trained(Role.QUERY, "nq") == {"query_encoder_nq"}
    assert trained(Role.QUERY, "fever") == {"query_encoder_fever"}
    assert trained(Role.PASSAGE, "nq") == {"passage_encoder"}
    assert trained(Role.PASSAGE, None) == {"passage_encoder"}


def test_towers_start_as_copies():
    model = q_spec()
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    assert params.keys() == set(TOWERS)
    kernels = [params[tower]["layers_0"]["mlp"]["wi"]["kernel"] for tower in TOWERS]
    equal = [np.array_equal(kernels[i], kernels[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert equal == [True] * 3
    # The optimiser donates the state: two towers may not share a buffer.
    assert len({kernel.unsafe_buffer_pointer() for kernel in kernels}) == 3


def test_sizes_axes_and_costs():
    one = abstract_params(DualEncoder(DualEncoderConfig()))
    config = DualEncoderConfig(**TASKS)
    shapes, axes = (function(DualEncoder(config)) for function in (abstract_params, logical_axes))
    # Three towers of BERT-base.
    assert parameter_count(shapes) == 3 * 108_891_648 == 3 * parameter_count(one)
    assert shapes.keys() == axes.keys() == set(TOWERS) == set(config.tower_names)
    # A text goes through one tower, whichever: arithmetic is the tied model's.
    shape = BatchShape(queries=8, query_length=32, passages=16, passage_length=160)
    assert config.training_flops(shape) == DualEncoderConfig().training_flops(shape)


def test_pretrained_weights_are_copied_into_every_tower_and_come_back():
    config = DualEncoderConfig(bert=tiny_bert(), **TASKS)
    source = random_params(tiny_model())["encoder"]
    other = random_params(tiny_model(), seed=4)["encoder"]
    params = from_plain_encoders(
        source, other, config=config, params=random_params(DualEncoder(config))
    )
    for tower, expected in zip(TOWERS, (source, source, other), strict=True):
        jax.tree.map(np.testing.assert_array_equal, params[tower], expected)
    params["query_encoder_nq"]["embeddings"]["token"]["embedding"][:] = 7
    for task in ("nq", "fever"):
        found = plain_encoder(params, config, Role.QUERY, task=task)
        assert (found["embeddings"]["token"]["embedding"] == 7).all() == (task == "nq")
    with pytest.raises(ConfigError, match="without a task"):
        plain_encoder(params, config, Role.QUERY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_tasks": ("nq",)}, "query_tasks with tied towers"),
        ({**TASKS, "query_tasks": ("nq", "nq")}, "distinct task names"),
        ({**TASKS, "query_tasks": ("nq/dev",)}, "without a slash"),
        ({**TASKS, "experts": ExpertConfig(num_experts=2)}, "in separate towers, experts"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DualEncoderConfig(**changes)


def test_a_query_without_its_tasks_tower_is_refused():
    model = q_spec()
    for task, message in ((None, "without a task"), ("trex", "of task 'trex'")):
        with pytest.raises(ConfigError, match=f"(?s){message}.*nq, fever"):
            jax.eval_shape(
                lambda p, task=task: encode(model, p, tiny_tokens(), Role.QUERY, task=task),
                abstract_params(model),
            )
