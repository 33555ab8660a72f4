"""A token store has the same bits whether SeqIO runs its tasks or nobody has imported SeqIO."""

from __future__ import annotations

import pathlib

import pytest
import seqio

from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.seqio_tasks import names, registry
from taser_jax.data.seqio_tasks.in_seqio import SeqioPassageTask, SeqioTask
from taser_jax.data.seqio_tasks.retrieval_task import CollectionPassages, RetrievalTask
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text.prompts import Prompt, TaskPrompt
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.text_settings import QueryNormalization
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "'", "é", "##b"]
TEXTS = ["a b c", "d’e ab", "", "h " * 40, "é e\u0301", "\U0001f600 a", "𐐀a"]

pytestmark = pytest.mark.usefixtures("empty_registries")


@pytest.fixture
def data_dir(tmp_path: pathlib.Path) -> str:
    folder = str(tmp_path / "data")
    passages = [Passage(f"p{i}", f"{text} f", TEXTS[i % 3]) for i, text in enumerate(TEXTS * 200)]
    write_collection(folder, "toy", passages)
    queries = [
        Query(f"q{i}", text, "one", tuple(range(i % 3)), (), (i,)) for i, text in enumerate(TEXTS)
    ]
    write_queries(folder, "toy", "one", "train", queries)
    return folder


def test_the_same_bits_from_both(data_dir: str, tmp_path: pathlib.Path):
    registry.add_retrieval_task(
        "toy_one",
        collection="toy",
        task="one",
        normalization=QueryNormalization.CURLY_APOSTROPHE,
        prompt=TaskPrompt(Prompt.NAME, name="b"),
        query_length=9,
    )
    registry.add_retrieval_mixture("toy", ["toy_one"])

    def made(name: str) -> dict[str, bytes]:
        tokenize_collection(
            data_dir=data_dir,
            mixture_or_task="toy",
            vocabulary=WordPieceVocabulary(PIECES),
            query_length=6,
            passage_length=12,
            output_dir=tmp_path / name,
        )
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    assert isinstance(registry.find_mixture_or_task("toy_one"), RetrievalTask)
    assert isinstance(registry.find_mixture_or_task("toy_passages"), CollectionPassages)
    ours = made("ours")
    # SeqIO has them too; now it has nothing but its own.
    names._here.clear()
    assert isinstance(registry.find_mixture_or_task("toy_one"), SeqioTask)
    assert isinstance(registry.find_mixture_or_task("toy_passages"), SeqioPassageTask)
    assert made("seqio") == ours


def test_seqio_mixes_our_tasks_and_its_own():
    registry.add_retrieval_task("ours", collection="toy", task="one")
    theirs = registry.add_retrieval_task(
        "theirs", collection="toy", task="two", query_preprocessors=[lambda dataset: dataset]
    )
    assert isinstance(theirs, SeqioTask)
    registry.add_retrieval_mixture("both", [("ours", 2.0), "theirs"], default_rate=1.0)
    seqio.MixtureRegistry.add("again", ["ours", ("theirs", 3.0)], default_rate=1.0)
    for name in ("both", "again"):
        assert [task.name for task in registry.retrieval_tasks(name)] == ["ours", "theirs"]
    assert registry.mixture_rates("both") == {"one": 2.0, "two": 1.0}
    assert registry.mixture_rates("again") == {"one": 1.0, "two": 3.0}


def test_a_name_is_registered_once():
    registry.add_retrieval_task("toy_one", collection="toy", task="one")
    with pytest.raises(ConfigError, match="'toy_one' is registered already"):
        registry.add_retrieval_task("toy_one", collection="toy", task="two")
    registry.remove("toy_one")
    assert "toy_one" not in seqio.TaskRegistry.names()
    registry.add_retrieval_task("toy_one", collection="toy", task="two")
    with pytest.raises(ConfigError, match="each task once"):
        registry.add_retrieval_mixture("toy", ["toy_one", ("toy_one", 2.0)])
