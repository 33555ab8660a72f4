"""Tasks over SeqIO sources of one's own: what they yield becomes queries of the collection."""

import functools

import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from taser_jax.data.collections.store import QuerySet, write_collection
from taser_jax.data.seqio_tasks.registry import add_retrieval_task, find_mixture, remove
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]

pytestmark = pytest.mark.usefixtures("empty_registries")


@pytest.fixture
def data_dir(tmp_path):
    passages = [Passage(f"p{i}", letter) for i, letter in enumerate("fgh")]
    write_collection(str(tmp_path / "data"), "toy", passages)
    return str(tmp_path / "data")


def from_csv(path):
    """A CSV file of query, positive, negative as a SeqIO source."""

    def dataset(split, shuffle_files, seed=None):
        columns = tf.data.experimental.CsvDataset(str(path), [tf.string] * 3)
        return columns.map(lambda query, good, bad: {"question": query, "good": good, "bad": bad})

    return seqio.FunctionDataSource(dataset, splits=["train", "extra"])


def renamed(**fields):
    return functools.partial(seqio.preprocessors.rekey, key_map=fields)


RENAMED = renamed(query="question", positives="good", hard_negatives="bad")


@pytest.fixture
def tokenized(data_dir, tmp_path):
    """Registers a task over a source and makes its token store."""

    def make(source, preprocessors=(RENAMED,)):
        from_source = {"source": source, "source_preprocessors": preprocessors}
        add_retrieval_task("faq", collection="toy", **from_source)
        return tokenize_collection(
            data_dir=data_dir,
            mixture=find_mixture("faq"),
            vocabulary=WordPieceVocabulary(PIECES),
            query_length=5,
            passage_length=4,
            output_dir=tmp_path / "tokens",
        )

    return make


@pytest.fixture
def csv_file(tmp_path):
    path = tmp_path / "faq.csv"
    path.write_text("a b,p2,p0\nc,p1,p2\n")
    return path


def test_a_csv_file_becomes_queries_of_the_collection(tokenized, csv_file, data_dir):
    store = tokenized(from_csv(csv_file))
    assert store.tasks == {"faq": ["train"]}
    stored = store.queries("faq", "train")
    assert list(stored.query_ids) == ["train-0", "train-1"]
    letters = [PIECES.index(letter) for letter in "abc"]
    assert stored.ids[:, :4].tolist() == [[2, *letters[:2], 3], [2, letters[2], 3, 0]]
    # Later commands read the queries there.
    queries = list(QuerySet.open(data_dir, "toy", "faq", "train"))
    found = [(query.text, query.positives, query.hard_negatives) for query in queries]
    assert found == [("a b", (2,), (0,)), ("c", (1,), (2,))]
    # The same source again is fine; another one under the same name is not.
    remove("faq")
    tokenized(from_csv(csv_file))
    csv_file.write_text("d,p0,p1\n")
    remove("faq")
    with pytest.raises(ConfigError, match=r"'faq' already has queries of split 'train'(.|\n)*fix"):
        tokenized(from_csv(csv_file))
    assert list(QuerySet.open(data_dir, "toy", "faq", "train")) == queries


def test_a_data_set_of_tfds(tokenized, data_dir, tmp_path):
    """As TFDS stores one, found by its name, and read without its code."""
    rows = {"train": [("x", "a b", ["p2", "p0"]), ("y", "c", ["p1"])], "test": [("z", "d", ["p0"])]}
    text = tfds.features.Text()
    features = {"id": text, "question": text, "gold": tfds.features.Sequence(text)}
    examples = {
        split: [(row[0], dict(zip(features, row, strict=True))) for row in of_split]
        for split, of_split in rows.items()
    }
    tfds.dataset_builders.store_as_tfds_dataset(
        name="faq_set",
        version="1.0.0",
        data_dir=tmp_path / "tfds",
        features=tfds.features.FeaturesDict(features),
        split_datasets=examples,
    )
    source = seqio.TfdsDataSource("faq_set:1.0.0", tfds_data_dir=str(tmp_path / "tfds"))
    store = tokenized(source, [renamed(query="question", query_id="id", positives="gold")])
    assert store.tasks == {"faq": ["train", "test"]}
    train, test = (set(QuerySet.open(data_dir, "toy", "faq", split)) for split in rows)
    assert train == {Query("x", "a b", "faq", (2, 0)), Query("y", "c", "faq", (1,))}
    assert test == {Query("z", "d", "faq", (0,))}


@pytest.mark.parametrize(
    ("row", "preprocessors", "words"),
    [
        ("a,p9,p0", (RENAMED,), r"split 'train', example 0: no passage has the id 'p9'"),
        ("a,p1,p0", (), "no query, but bad, good, question"),
    ],
)
def test_a_bad_example_is_named(tokenized, csv_file, row, preprocessors, words):
    csv_file.write_text(row + "\n")
    with pytest.raises(DataError, match=words):
        tokenized(from_csv(csv_file), preprocessors=preprocessors)
