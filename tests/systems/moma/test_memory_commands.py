"""Memories plugged in and out, documents looked up, and a training on queries with documents.

Embeddings by text: passages of a frozen tower that nothing encodes twice.
"""

import dataclasses
import shutil
import types

import numpy as np
import pytest
import tiny_training
from tiny_models import assert_close

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.encode import encode
from taser_jax.commands.train import train
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.fusion import BertFusionConfig, FusedStates
from taser_jax.optim.optimizers import OptimizerConfig, Update
from taser_jax.retrieval.embeddings import EmbeddingDtype, Embeddings, QueryEmbeddings
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError
from taser_jax.systems.moma import augment, distillation
from taser_jax.systems.moma.memories import Mixture
from taser_jax.systems.moma.memory import (
    EmbeddingsByText,
    MemoryAction,
    add_memory,
    memory,
    remove_memory,
)
from taser_jax.systems.moma.query_documents import Augmentation, read_lookup

PLAIN = tiny_training.model_config()
TWO_BLOCKS = dataclasses.replace(PLAIN.bert, num_layers=2)
TRAINING = tiny_training.training_config(train_steps=3, evaluation_period=3)


def fusion(**changes):
    fields = {"bert": PLAIN.bert, "pooling": PLAIN.pooling, "towers": Towers.SEPARATE}
    return BertFusionConfig(**fields | {"decoder_layers": 1} | changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two token stores, of which the second has some of the first's passages, and a model."""
    root = tmp_path_factory.mktemp("memories")
    stores = []
    for name, passages in (("first", 48), ("second", 60)):
        # The same draws: the first passages of both are the same texts.
        tiny_training.write_token_store(root / name, num_passages=passages, least_words=10)
        stores.append(str(root / name))
    tiny_training.write_untrained(root / "model", fusion(), root / "first")
    return types.SimpleNamespace(stores=stores, model_dir=str(root / "model"))


@pytest.fixture(scope="module")
def mixture_dir(world, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("mixture"))
    add(world, directory, "source", 0)
    add(world, directory, "more", 1)
    return directory


def look_up(world, memory_dir, output_dir, **changes):
    """Documents of the memories for the first store's queries."""
    about = {"token_store": world.stores[0], "model_dir": world.model_dir}
    about |= {"memory_dir": memory_dir, "output_dir": str(output_dir)}
    return augment.augment(**about | changes)


def add(world, directory, name, number, **changes):
    arguments = {"token_store": world.stores[number], "model_dir": world.model_dir}
    return add_memory(name=name, memory_dir=directory, **arguments | changes)


@pytest.fixture(scope="module")
def given(world, mixture_dir, tmp_path_factory):
    """Arguments of what reads three of four documents looked up for each query."""
    documents = str(tmp_path_factory.mktemp("documents"))
    look_up(world, mixture_dir, documents, k=4)
    return {"token_store": world.stores[0], "augmentation_dir": documents, "documents": 3}


@pytest.mark.slow
def test_only_new_documents_are_encoded(world, tmp_path):
    directory = str(tmp_path)
    assert add(world, directory, "more", 1) == {"encoded": 60, "kept": 0}
    shared = [TokenStore.open(store).passages.ids[:48] for store in world.stores]
    np.testing.assert_array_equal(*shared)
    # Every passage of the first is also one of the second.
    assert add(world, directory, "source", 0) == {"encoded": 0, "kept": 60}
    assert memory(action=MemoryAction.REMOVE, name="more", memory_dir=directory) == ["source"]
    assert memory(action=MemoryAction.LIST, memory_dir=directory) == ["source"]
    assert len(Mixture.open(directory)) == 48
    assert add(world, directory, "more", 1) == {"encoded": 0, "kept": 60}
    assert memory(memory_dir=directory) == ["source", "more"]


@pytest.mark.slow
def test_a_mixture_is_one_collection_in_which_equal_texts_are_one(world, mixture_dir):
    mixture, model = Mixture.open(mixture_dir), load_model(world.model_dir)
    assert len(mixture) == 60
    memory, rows = mixture.places(np.array([0, 47, 48, 59]))
    assert memory.tolist() == [0, 0, 1, 1]
    assert rows.tolist() == [0, 47, 48, 59]
    store, places = TokenStore.open(world.stores[1]), Ragged.from_lists([np.arange(60)])
    queries = dataclasses.replace(store.queries("first", "train"), positives=places)
    np.testing.assert_array_equal(mixture.gold("more", queries)[0], np.arange(60))
    with pytest.raises(FingerprintError, match=r"^memory 'more': made from collection"):
        mixture.gold("more", dataclasses.replace(queries, collection_fingerprint="other"))
    chosen = np.array([3, 55, 20])
    tokens, expected = mixture.tokens(chosen), store.passages.tokens(chosen)
    np.testing.assert_array_equal(tokens.ids, expected.ids)
    np.testing.assert_array_equal(tokens.mask, expected.mask)
    # Rows of the joined index are the passages' own embeddings.
    joined = EmbeddingsByText.of_mixture(mixture)
    encoded = model.encode_fn(Role.PASSAGE)(expected)
    np.testing.assert_allclose(joined.take(chosen), encoded, atol=1e-5)
    np.testing.assert_array_equal(joined[10:70], joined.take(np.arange(10, 60)))


def test_directories_may_be_links_to_another_disk(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = shutil.copytree(world.stores[0], "here/tokens")
    for name in ("memories", "documents"):
        (tmp_path / "disk/far/away" / name).mkdir(parents=True)
        (tmp_path / "here" / name).symlink_to(tmp_path / "disk/far/away" / name)
    about = {"model_dir": world.model_dir, "memory_dir": "here/memories"}
    for name in ("source", "again"):
        # The second reads what the first wrote.
        add_memory(name=name, token_store=store, **about)
    augment.augment(**about, token_store=store, output_dir="here/documents", tasks=["first"], k=2)
    tokens = TokenStore.open(store)
    documents = Augmentation("here/documents", per_query=2, config=fusion(), store=tokens)
    texts = documents.of_queries(tokens.queries("first", "validation"))
    assert texts.tokens(np.arange(1)).present.all()


@pytest.mark.slow
def test_lookups_are_the_best_of_all_memories(world, mixture_dir, tmp_path):
    counts = look_up(world, mixture_dir, tmp_path, tasks=["first"], k=5)
    assert counts == {"first train": 32, "first validation": 16}
    lookup = read_lookup(tmp_path, "first", "validation").run
    model, mixture = load_model(world.model_dir), Mixture.open(mixture_dir)
    queries = TokenStore.open(world.stores[0]).queries("first", "validation")
    embedded = np.asarray(model.encode_fn(Role.QUERY)(queries.tokens(np.arange(16))))
    scores = embedded @ EmbeddingsByText.of_mixture(mixture)[:].T
    best = -np.sort(-scores, axis=1)[:, :5]
    np.testing.assert_allclose(lookup.scores, best, rtol=1e-4, atol=1e-5)
    of_rows = np.take_along_axis(scores, lookup.rows, axis=1)
    np.testing.assert_allclose(of_rows, best, rtol=1e-4, atol=1e-5)


def test_training_queries_can_do_without_their_own_positives(world, mixture_dir, tmp_path):
    look_up(world, mixture_dir, tmp_path / "with", tasks=["first"], k=6)
    options = {"tasks": ["first"], "k": 5, "without_gold_of": "source"}
    look_up(world, mixture_dir, tmp_path / "without", **options)
    store = TokenStore.open(world.stores[0])
    removed = 0
    for split in ("train", "validation"):
        gold = [rows[0] for rows in store.queries("first", split).positives]
        whole, others = (read_lookup(tmp_path / n, "first", split).run for n in ("with", "without"))
        for own, line, documents in zip(gold, whole.rows, others.rows, strict=True):
            # Other splits keep theirs; a positive's place goes to the next document.
            rest = line[line != own] if split == "train" else line
            assert documents.tolist() == rest[:5].tolist()
            removed += split == "train" and own in line[:5]
    assert removed
    with pytest.raises(ConfigError, match=r"no memory 'sorce'(?s:.*)source, more"):
        look_up(world, mixture_dir, tmp_path / "x", **options | {"without_gold_of": "sorce"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents",
    [FusedStates.TOKENS, pytest.param(FusedStates.EMBEDDINGS, marks=pytest.mark.release)],
)
def test_training_and_encoding_take_documents(given, tmp_path, documents):
    config, data, model_dir = fusion(documents=documents), TrainingData(**given), tmp_path / "model"
    summary = train(model_dir=str(model_dir), data=data, model=config, training=TRAINING)
    assert np.isfinite(summary.validation["nll"])
    trained = load_model(model_dir)
    assert np.abs(trained.params["query_encoder"]["fusion_projection"]["kernel"]).max() > 0
    output_dir = str(tmp_path / "embeddings")
    encode(model_dir=str(model_dir), output_dir=output_dir, tasks=["first"], **given)
    encoded = QueryEmbeddings.of_split(output_dir, "first", "validation")
    store, documents_dir = TokenStore.open(given["token_store"]), given["augmentation_dir"]
    looked_up = Augmentation(documents_dir, per_query=3, config=config, store=store)
    texts = looked_up.of_queries(store.queries("first", "validation")).tokens(np.arange(16))
    fused = trained.encode_fn(Role.QUERY)(texts)
    np.testing.assert_allclose(encoded[:], fused, atol=1e-5)
    alone = trained.encode_fn(Role.QUERY)(texts.query)
    assert np.abs(np.asarray(alone) - np.asarray(fused)).max() > 1e-6
    more = dataclasses.replace(data, documents=5)
    for documents, model, message in (
        (more, config, "5 documents per query of 4 looked up"),
        (data, PLAIN, "this model fuses none"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(model_dir=str(tmp_path / "x"), data=documents, model=model, training=TRAINING)


def test_attention_to_cached_states_is_as_to_tokens(
    world, mixture_dir, given, tmp_path, monkeypatch
):
    model_dir, model = tmp_path / "model", fusion(bert=TWO_BLOCKS, towers=Towers.TIED)
    tiny_training.write_untrained(model_dir, model, world.stores[0])
    monkeypatch.setattr(distillation, "read_facts", lambda _: {"train_from_block": 2})
    about = {"model_dir": str(model_dir), "memory_dir": mixture_dir, "tasks": ["first"], **given}
    shares, positives = [], []
    for states_dir in (None, str(tmp_path / "states")):
        output_dir = str(tmp_path / f"joined-{states_dir is None}")
        places = {"output_dir": output_dir, "states_dir": states_dir}
        shares += distillation.distil_queries(**about, **places, learned=1)["attention"]
        queries = TokenStore.open(output_dir).queries("first", "train")
        positives.append([*map(list, queries.positives)])
    on_tokens, on_states = shares
    assert on_tokens["task"] == "first"
    assert on_states["attention"] == pytest.approx(on_tokens["attention"], abs=1e-5)
    assert positives[0] == positives[1] != []
    [folder] = (tmp_path / "states" / "documents").iterdir()
    assert (folder / "states.npy").exists()
    # Towers that are no copies of each other, as after training both.
    monkeypatch.setattr(BertFusionConfig, "initial_params", lambda _, params: params)
    apart = {"train_from_block": 1, "states_dir": str(tmp_path / "apart")}
    about = {"data": TrainingData(**given), "model": fusion(bert=TWO_BLOCKS)}
    about["training"] = dataclasses.replace(TRAINING, **apart)
    with pytest.raises(ConfigError, match="whose frozen blocks are its own"):
        train(model_dir=str(tmp_path / "x"), **about)


@pytest.mark.release
@pytest.mark.slow
def test_documents_as_cached_states_train_and_encode_as_tokens_do(given, tmp_path):
    model = fusion(bert=TWO_BLOCKS, towers=Towers.TIED)
    queries = []
    cached = {"states_dir": str(tmp_path / "states"), "states_dtype": EmbeddingDtype.FLOAT32}
    for states in ({}, cached):
        model_dir, output_dir = (str(tmp_path / f"{part}-{len(states)}") for part in "me")
        training = dataclasses.replace(TRAINING, train_from_block=1, **states)
        train(model_dir=model_dir, data=TrainingData(**given), model=model, training=training)
        encode(model_dir=model_dir, output_dir=output_dir, tasks=["first"], **states, **given)
        queries.append(QueryEmbeddings.of_split(output_dir, "first", "validation")[:])
    np.testing.assert_allclose(*queries, atol=1e-5)


@pytest.mark.parametrize(
    ("action", "arguments", "missing"),
    [
        (MemoryAction.ADD, {"name": "wiki"}, "TOKEN_STORE"),
        (MemoryAction.ADD, {"name": "wiki", "token_store": "tokens"}, "MODEL_DIR"),
        (MemoryAction.REMOVE, {}, "NAME"),
    ],
)
def test_an_action_needs_what_it_reads(action, arguments, missing, tmp_path):
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        memory(action=action, memory_dir=str(tmp_path), **arguments)


@pytest.mark.slow
def test_what_cannot_be_plugged_in_or_looked_up(world, mixture_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)no memory 'mesh'.*source, more"):
        remove_memory(name="mesh", memory_dir=mixture_dir)
    with pytest.raises(DataError, match="the directory has no memories"):
        memory(memory_dir=str(tmp_path / "nothing"))
    for wrong, words in (
        ({"k": 0}, "set DOCUMENTS to 1 to 60"),
        ({"k": 61}, "set DOCUMENTS to 1 to 60"),
        ({"tasks": ["third"]}, r"(?s)no task third.*some of first, second"),
        ({"splits": ["test"]}, r"(?s)augment.splits: no split test.*train, val"),
    ):
        with pytest.raises(ConfigError, match=words):
            look_up(world, mixture_dir, tmp_path / "documents", **wrong)
    other = tmp_path / "other"
    tiny_training.write_untrained(other, fusion(), world.stores[0], seed=7)
    with pytest.raises(FingerprintError, match="add this model's memories to a directory"):
        add(world, mixture_dir, "more", 1, model_dir=str(other))
    with pytest.raises(FingerprintError, match="add the memories with this model"):
        look_up(world, mixture_dir, tmp_path / "documents", model_dir=str(other))


@pytest.mark.slow
def test_a_pipeline_looks_up_in_the_memories_it_names_alone(world, tmp_path):
    """Also where a run that was killed had added others."""
    memories = dict(zip(("source", "more"), world.stores, strict=True))

    def look_up_in(*names):
        places = {name: str(tmp_path / name) for name in ("memory_dir", "output_dir")}
        chosen = {name: memories[name] for name in names}
        about = {"token_store": world.stores[0], "model_dir": world.model_dir, "k": 60}
        about |= {"shared_embeddings": str(tmp_path / "shared"), "config": EncodeConfig()}
        encoded = augment.look_up(memories=chosen, **about, **places)["encoded"]
        looked_up = read_lookup(places["output_dir"], "first", "train").run.rows
        return Mixture.open(places["memory_dir"]).manifest.names, encoded, looked_up.shape[1]

    assert look_up_in("source", "more") == (["source", "more"], {"source": 48, "more": 12}, 60)
    assert look_up_in("source") == (["source"], {"source": 0}, 48)
    assert look_up_in("more", "source")[0] == ["more", "source"]


@pytest.mark.slow
def test_memories_that_have_changed_are_refused(world, tmp_path):
    store, directory = tmp_path / "second", str(tmp_path / "mixture")
    shutil.copytree(world.stores[1], store)
    add(world, directory, "source", 0)
    more = {"token_store": str(store)}
    add(world, directory, "more", 1, **more)
    documents = str(tmp_path / "documents")
    look_up(world, directory, documents, k=4)
    remove_memory(name="more", memory_dir=directory)
    data = TrainingData(world.stores[0], augmentation_dir=documents, documents=2)
    with pytest.raises(FingerprintError, match="the memories have changed"):
        train(model_dir=str(tmp_path / "m"), data=data, model=fusion(), training=TRAINING)
    add(world, directory, "more", 1, **more)
    (store / "checksums.txt").unlink()
    metadata = store / "metadata.json"
    text = metadata.read_text()
    metadata.write_text(text.replace('"collection": "tiny"', '"collection": "other"'))
    with pytest.raises(ConfigError, match=r"(?s)'more' is collection 'tiny'.*another NAME"):
        add(world, directory, "more", 1, **more)
    fingerprint = TokenStore.open(store).metadata.passages_fingerprint
    metadata.write_text(text.replace(fingerprint, "0" * len(fingerprint)))
    with pytest.raises(FingerprintError, match="tokens of memory 'more' have changed"):
        memory(memory_dir=directory)


FROZEN = (("passage_encoder/.*", Update.FREEZE), ("query_encoder/.*", Update.TRAIN))
# Its dropout is 0, as a frozen tower's is where its embeddings are read.
PLAIN_TOWERS = DualEncoderConfig(PLAIN.bert, pooling=PLAIN.pooling, towers=Towers.SEPARATE)


def on_frozen(updates=FROZEN, **changes):
    config = tiny_training.training_config(**{"train_steps": 3, **changes})
    # A constant rate: two steps and one more are three.
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, floor=1.0, updates=updates)
    return dataclasses.replace(config, optimizer=optimizer)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A token store, a model, and its passage tower's embeddings by text; as text, by name."""
    root = tmp_path_factory.mktemp("shared")
    shared = {name: str(root / name) for name in ("store", "model", "embeddings", "shared")}
    tiny_training.write_token_store(root / "store", num_passages=48, least_words=10)
    tiny_training.write_untrained(root / "model", PLAIN_TOWERS, root / "store")
    encode(
        model_dir=shared["model"],
        token_store=shared["store"],
        output_dir=shared["embeddings"],
        shared_embeddings=shared["shared"],
        query_splits=[],
    )
    return shared


@pytest.mark.slow
def test_training_on_embeddings_is_training_on_tokens_also_after_a_kill(shared, tmp_path):
    results = {}
    on_embeddings = {"shared_embeddings": shared["shared"]}
    for name, steps, data in (
        ("tokens", 3, {}),
        ("embeddings", 2, on_embeddings),
        ("embeddings", 3, on_embeddings),
    ):
        summary = train(
            model_dir=str(tmp_path / name),
            data=TrainingData(shared["store"], **data),
            model=PLAIN_TOWERS,
            training=on_frozen(evaluation_period=3, train_steps=steps),
            initial_checkpoint=f"{shared['model']}/checkpoint_0",
        )
        results[name] = summary, load_model(tmp_path / name, step=steps)
    (first, tokens), (second, embedded) = results.values()
    assert first.validation["nll"] == pytest.approx(second.validation["nll"], abs=1e-5)
    assert embedded.passage_fingerprint == load_model(shared["model"]).passage_fingerprint
    # Adam divides by gradients' size: equal to rounding in the loss, close in the weights.
    towers = (model.params["query_encoder"] for model in (tokens, embedded))
    assert_close(*towers, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_models_of_one_passage_tower_encode_a_text_once(shared, tmp_path):
    direct = {"model_dir": shared["model"], "token_store": shared["store"]}
    encode(**direct, output_dir=str(tmp_path / "direct"), query_splits=[])
    of_texts, expected = (Embeddings(d) for d in (shared["embeddings"], tmp_path / "direct"))
    np.testing.assert_allclose(of_texts[:], expected[:], atol=1e-6)
    assert of_texts.fingerprints == expected.fingerprints
    memories = {"memory_dir": str(tmp_path / "memories"), "shared_embeddings": shared["shared"]}
    assert add_memory(name="source", **memories, **direct) == {"encoded": 0, "kept": 48}


@pytest.mark.slow
def test_a_tower_that_is_trained_or_another_one_is_refused(shared, tmp_path):
    data = TrainingData(shared["store"], shared_embeddings=shared["shared"])
    trained, other = on_frozen(updates=None), on_frozen(validates=False)
    for config, error, message in (
        (trained, ConfigError, "passage_encoder is trained"),
        (dataclasses.replace(other, seed=9), FingerprintError, "embeddings by text"),
    ):
        with pytest.raises(error, match=message):
            train(model_dir=str(tmp_path / "model"), data=data, model=PLAIN_TOWERS, training=config)
