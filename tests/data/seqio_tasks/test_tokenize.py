import json

import numpy as np
import pytest
import seqio

from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.seqio_tasks import registry as retrieval
from taser_jax.data.seqio_tasks import tokenize
from taser_jax.data.seqio_tasks.retrieval_task import use_data
from taser_jax.data.text.preprocessors import Prompt, TaskPrompt, encode_passages, encode_queries
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import QueryNormalization, Titles, TokenStore
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "0", "1", "2", "##1"]
RANDOM = np.random.default_rng(0)
PASSAGES = [
    Passage(f"p{i}", " ".join(RANDOM.choice(list("abcdefg"), length)), "t u"[: i % 4])
    for i, length in enumerate(RANDOM.integers(1, 30, 300))
]
QUERIES = {
    (task, split): [
        Query(f"{task}-{split}-{i}", f"{task[0]} {split[1]} {i}", task, (i, 7), (), (9,) * (i % 3))
        for i in range(count)
    ]
    for task, split, count in (("one", "train", 130), ("one", "test", 3), ("two", "train", 5))
}


@pytest.fixture(autouse=True)
def registered(empty_registries):
    for task in ("one", "two", "three"):
        retrieval.add_retrieval_task(f"toy_{task}", collection="toy", task=task)
    retrieval.add_retrieval_mixture("toy", ["toy_one", "toy_two"])


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("tokenize")
    write_collection(root, "toy", PASSAGES)
    for (task, split), queries in QUERIES.items():
        write_queries(root, "toy", task, split, queries)
    WordPieceVocabulary(PIECES).save(str(root / "vocabulary"))
    lengths = {"query_length": 6, "passage_length": 16}
    return {"data_dir": root, "mixture": "toy", "vocabulary": root / "vocabulary", **lengths}


def make(*, mixture: str, **settings) -> TokenStore:
    return tokenize.tokenize_collection(mixture=retrieval.find_mixture(mixture), **settings)


def test_store_holds_what_the_questions_encode_to(settings, tmp_path):
    store = make(**settings, output_dir=tmp_path / "tokens")
    vocabulary = load_vocabulary(store.vocabulary_directory)
    assert vocabulary.fingerprint == store.metadata.vocabulary_fingerprint
    assert store.tasks == {"one": ["train", "test"], "two": ["train"]}
    for (task, split), queries in QUERIES.items():
        stored = store.queries(task, split)
        expected = encode_queries([q.text for q in queries], vocabulary, length=6)
        np.testing.assert_array_equal(stored.tokens(np.arange(len(queries))).ids, expected.ids)
        assert stored.query_ids == [q.id for q in queries]
        assert [rows.tolist() for rows in stored.positives] == [list(q.positives) for q in queries]
        assert [len(rows) for rows in stored.hard_negatives] == [i % 3 for i in range(len(queries))]


def test_same_inputs_are_not_tokenised_again(settings, tmp_path):
    output = {"output_dir": tmp_path / "tokens"}
    settings = settings | {"mixture": "toy_two"}
    first = make(**settings, **output)
    ids = tmp_path / "tokens" / "passages" / "ids.npy"
    before = ids.stat().st_mtime_ns
    again = make(**settings, **output)
    assert (again.metadata, ids.stat().st_mtime_ns) == (first.metadata, before)

    shorter = settings | {"passage_length": 12, "replace": True}
    told = r"(?s)another token store is here: lengths\.passage 16, now 12.*another TOKEN_STORE"
    with pytest.raises(ConfigError, match=told):
        make(**shorter | {"replace": False}, **output)
    cased = WordPieceVocabulary(PIECES, lower_case=False)
    with pytest.raises(ConfigError, match=f"vocabulary .*, now {cased.fingerprint}"):
        make(**settings | {"vocabulary": cased}, **output)
    assert ids.stat().st_mtime_ns == before
    # Who has the old store open, as a training has, keeps its ids, and is not given other ones.
    old = first.passages.tokens(np.arange(300)).ids.copy()
    changed = make(**shorter, **output)
    assert changed.passages.ids.shape == (300, 12)
    np.testing.assert_array_equal(first.passages.tokens(np.arange(300)).ids, old)
    with pytest.raises(DataError, match=rf"replaced by a store .*{changed.metadata.fingerprint}"):
        first.queries("two", "train")


def test_what_is_no_store_is_not_replaced(settings, tmp_path):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / ".git").mkdir()
    with pytest.raises(ConfigError, match="there is something here already"):
        make(**settings, output_dir=tmp_path / "tokens", replace=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["tokens", ".git"]


def preprocessed(function, settings, output_dir):
    """Ids of task two with a preprocessor: made anew, and the same when nothing has changed."""
    retrieval.remove("toy_two")
    of_task = {"collection": "toy", "task": "two", "query_preprocessors": [function]}
    retrieval.add_retrieval_task("toy_two", **of_task)
    only = settings | {"mixture": "toy_two", "output_dir": output_dir / "tokens"}
    ids = make(**only, replace=True).queries("two", "train").ids
    assert make(**only).queries("two", "train").ids.tolist() == ids.tolist()
    return ids


def test_a_changed_preprocessor_is_noticed(settings, tmp_path):
    for prompt in "ab":
        function = eval(f"lambda d: d.map(lambda x: {{**x, 'query': '{prompt} ' + x['query']}})")
        # Without a source, it is told by its name.
        function.__name__ = function.__qualname__ = f"put_{prompt}"
        assert preprocessed(function, settings, tmp_path)[0, 1] == PIECES.index(prompt)


def _putting(before):
    return lambda data: data.map(lambda x: {**x, "query": _joined(before, x["query"])})


def _joined(before, query):
    return before + _SPACE + query


_SPACE = " "


def test_what_a_preprocessor_takes_from_around_it_is_noticed(settings, tmp_path, monkeypatch):
    """A variable of the function that made it, and a constant of a function that it calls."""
    for before, space in (("a", " "), ("b", " "), ("b", " c ")):
        monkeypatch.setitem(globals(), "_SPACE", space)
        ids = preprocessed(_putting(before), settings, tmp_path)
        assert ids[0, 1] == PIECES.index(before)
        assert (ids[0, 2] == PIECES.index("c")) == (space == " c ")


@pytest.mark.parametrize(
    ("titles", "text"),
    [(Titles.OMIT, ""), (Titles.JOIN, ""), (Titles.INCLUDE, "ba"), (Titles.INCLUDE, "")],
)
def test_passages_and_an_open_vocabulary(settings, tmp_path, monkeypatch, titles, text):
    """300 passages: several blocks, the last not full."""
    monkeypatch.setattr(tokenize, "_BLOCK", 128)
    prompt = TaskPrompt(Prompt.TEXT, text=" ".join(text)) if text else TaskPrompt()
    retrieval.add_passages("toy", titles=titles, prompt=prompt)
    vocabulary = load_vocabulary(settings["vocabulary"])
    only = settings | {"vocabulary": vocabulary, "mixture": "toy_one", "output_dir": tmp_path}
    store = make(**only)
    ids = tuple(PIECES.index(piece) for piece in text)
    expected = encode_passages(PASSAGES, vocabulary, length=16, titles=titles, prompt=ids)
    tokens = store.passages.tokens(np.arange(len(PASSAGES)))
    np.testing.assert_array_equal(tokens.ids, expected.ids)
    np.testing.assert_array_equal(tokens.mask, expected.mask)
    assert (store.metadata.titles, store.metadata.passage_prompt) == (titles.value, ids)
    assert store.tasks == {"one": ["train", "test"]}
    assert json.loads((tmp_path / tokenize.INPUTS).read_text())["mixture_or_task"] == "toy_one"
    retrieval.add_passages("toy", prompt=TaskPrompt(Prompt.TEXT, text="c"))
    with pytest.raises(ConfigError, match="another token store is here"):
        make(**only)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mixture": "toy_three"}, DataError, "'three' is not among the prepared tasks: one, two"),
        ({"query_length": 3}, ConfigError, "length 3"),
        ({"data_dir": "nowhere"}, DataError, "taser prepare"),
        ({"vocabulary": "nowhere"}, DataError, "VOCAB_SIZE"),
    ],
)
def test_bad_settings_are_reported_before_any_work(settings, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        make(**settings | change, output_dir=tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


ODD = ["a b c", "d’e ab", "", "h " * 40, "é e\u0301", "\U0001f600 a", "𐐀a"]


def test_the_same_tokens_whether_seqio_runs_tasks_or_nobody_has_imported_it(tmp_path):
    vocabulary = WordPieceVocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh'é", "##b"])
    data = {"data_dir": str(tmp_path / "data"), "vocabulary": vocabulary}
    write_collection(data["data_dir"], "odd", [Passage("p0", "a"), Passage("p1", "b")])
    queries = [Query(f"q{i}", o, "one", (1, 0)[: i % 3], (), (i % 2,)) for i, o in enumerate(ODD)]
    write_queries(data["data_dir"], "odd", "one", "train", queries)

    task = {"collection": "odd", "task": "one", "prompt": TaskPrompt(Prompt.NAME, name="b")}
    task |= {"normalization": QueryNormalization.CURLY_APOSTROPHE, "query_length": 9}

    def made(name: str, **settings) -> TokenizedQueries:
        retrieval.add_retrieval_task(name, **task, **settings)
        lengths = {"query_length": 6, "passage_length": 12}
        store = make(mixture=name, **data, **lengths, output_dir=tmp_path / name)
        return store.queries("one", "train")

    plain = made("plain")
    # The fingerprint is of ids, tokens, positives and hard negatives.
    run_by_seqio = made("run_by_seqio", query_preprocessors=[lambda data: data])
    assert run_by_seqio.fingerprint == plain.fingerprint
    with use_data(**data):
        of_seqio = seqio.get_mixture_or_task("plain")
        examples = of_seqio.get_dataset({"query": 9}, split="train", shuffle=False)
        for row, example in enumerate(examples.as_numpy_iterator()):
            np.testing.assert_array_equal(example["query"], plain.ids[row, : plain.lengths[row]])
            np.testing.assert_array_equal(example["positives"], plain.positives[row])
    assert row == len(ODD) - 1
