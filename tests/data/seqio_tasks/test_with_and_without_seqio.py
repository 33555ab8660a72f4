"""A token store has the same tokens whether SeqIO runs its tasks or nobody has imported SeqIO."""

from __future__ import annotations

import numpy as np
import pytest
import seqio

from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.seqio_tasks import registry
from taser_jax.data.seqio_tasks.retrieval_task import use_data
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text.hugging_face import WordPieceVocabulary
from taser_jax.data.text.preprocessors import Prompt, TaskPrompt
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import QueryNormalization
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "'", "é", "##b"]
TEXTS = ["a b c", "d’e ab", "", "h " * 40, "é e\u0301", "\U0001f600 a", "𐐀a"]

pytestmark = pytest.mark.usefixtures("empty_registries")


@pytest.fixture
def data_dir(tmp_path) -> str:
    folder = str(tmp_path / "data")
    write_collection(folder, "toy", [Passage("p0", "a"), Passage("p1", "b")])
    queries = [
        Query(f"q{i}", text, "one", (1, 0)[: i % 3], (), (i % 2,)) for i, text in enumerate(TEXTS)
    ]
    write_queries(folder, "toy", "one", "train", queries)
    return folder


def test_the_same_tokens_from_both(data_dir, tmp_path):
    vocabulary = WordPieceVocabulary(PIECES)

    def made(name: str, **settings) -> TokenizedQueries:
        registry.add_retrieval_task(
            name,
            collection="toy",
            task="one",
            normalization=QueryNormalization.CURLY_APOSTROPHE,
            prompt=TaskPrompt(Prompt.NAME, name="b"),
            query_length=9,
            **settings,
        )
        store = tokenize_collection(
            data_dir=data_dir,
            mixture=registry.find_mixture(name),
            vocabulary=vocabulary,
            query_length=6,
            passage_length=12,
            output_dir=tmp_path / name,
        )
        return store.queries("one", "train")

    plain = made("plain")
    # The fingerprint is of ids, tokens, positives and hard negatives.
    assert made("run_by_seqio", query_preprocessors=[lambda data: data]).fingerprint == (
        plain.fingerprint
    )
    with use_data(data_dir=data_dir, vocabulary=vocabulary):
        dataset = seqio.get_mixture_or_task("plain").get_dataset(
            {"query": 9}, split="train", shuffle=False
        )
        for row, example in enumerate(dataset.as_numpy_iterator()):
            length = plain.lengths[row]
            np.testing.assert_array_equal(example["query"], plain.ids[row, :length])
            np.testing.assert_array_equal(example["positives"], plain.positives[row])
    assert row == len(TEXTS) - 1


def test_a_name_is_registered_once():
    registry.add_retrieval_task("toy_one", collection="toy", task="one")
    with pytest.raises(ConfigError, match="'toy_one' is registered already"):
        registry.add_retrieval_task("toy_one", collection="toy", task="two")
    registry.remove("toy_one")
    assert "toy_one" not in seqio.TaskRegistry.names()
    registry.add_retrieval_task("toy_one", collection="toy", task="two")
    with pytest.raises(ConfigError, match="each task once"):
        registry.add_retrieval_mixture("toy", ["toy_one", ("toy_one", 2.0)])
