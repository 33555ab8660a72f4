import numpy as np
import pytest
from sentence_models import t5_model

from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.seqio_tasks import registry as retrieval
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text.preprocessors import Family, Prompt, TaskPrompt, passage_ids, query_ids
from taser_jax.data.text.vocabularies import SentencePieceVocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "nq", "a", "b", "c", "fact", "checking"]
CLS, SEP, NQ, A, B, C = 2, 3, 4, 5, 6, 7
VOCABULARY = WordPieceVocabulary(PIECES)

pytestmark = pytest.mark.usefixtures("empty_registries")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    data_dir = str(tmp_path_factory.mktemp("data"))
    write_collection(data_dir, "toy", [Passage("0", "a b c"), Passage("1", "c")])
    for task in ("short", "long"):
        queries = [Query(f"q{i}", "a b c " * (1 + 3 * i), task, positives=(i,)) for i in range(2)]
        write_queries(data_dir, "toy", task, "train", queries)
    return data_dir


@pytest.fixture
def tokenized(data_dir, tmp_path):
    """Makes the token store of a task or mixture, where another one may be."""
    return lambda name: tokenize_collection(
        data_dir=data_dir,
        mixture=retrieval.find_mixture(name),
        vocabulary=VOCABULARY,
        query_length=6,
        passage_length=8,
        output_dir=tmp_path / "tokens",
        replace=True,
    )


def test_name_marker_and_nothing():
    assert TaskPrompt().ids(VOCABULARY) == []
    name = TaskPrompt(Prompt.NAME, name="NQ", family=Family.FACT_CHECKING)
    assert name.ids(VOCABULARY) == [NQ, SEP]
    assert TaskPrompt(Prompt.NAME, name="NQ", separator="c").ids(VOCABULARY) == [NQ, C]
    marker = TaskPrompt(Prompt.MARKER, family=Family.FACT_CHECKING)
    assert marker.ids(VOCABULARY) == [8, 9]
    assert marker.ids(WordPieceVocabulary([*PIECES, "[unused1]", "[unused2]"])) == [11]
    with pytest.raises(ConfigError, match=r"(?s)'<extra_id_1>' is not a piece.*extra_ids=100"):
        TaskPrompt(Prompt.NAME, name="NQ", separator="<extra_id_1>").ids(VOCABULARY)
    with pytest.raises(ConfigError, match="'name' without its"):
        TaskPrompt(Prompt.NAME)
    with pytest.raises(ConfigError, match="'marker' without its"):
        TaskPrompt(Prompt.MARKER, name="NQ")


def test_pieces_by_name_in_both_kinds_of_vocabulary():
    assert [VOCABULARY.id_of(piece) for piece in ("nq", "[SEP]", "x")] == [4, 3, None]
    model = t5_model(["a b c nq", "b c a nq"] * 5, 16, user_defined_symbols=["<extra_id_1>"])
    t5 = SentencePieceVocabulary(model)
    assert (t5.id_of("</s>"), t5.id_of("<pad>"), t5.id_of("<extra_id_2>")) == (1, 0, None)
    extra = t5.id_of("<extra_id_1>")
    given = TaskPrompt(Prompt.NAME, name="nq", separator="<extra_id_1>")
    assert given.ids(t5) == [*t5.encode(["nq"])[0], extra]
    assert TaskPrompt(Prompt.NAME, name="nq").ids(t5)[-1] == t5.sep_id
    # T5's vocabularies put nothing first.
    ids = query_ids(["a b c"], t5, 5, QuerySettings(prompt=(extra,)))
    assert ids == [[extra, *t5.encode(["a b c"])[0][:3], 1]]


def test_long_queries_are_cut_after_the_prompt():
    texts = ["a b c", "", "c"]
    ids = query_ids(texts, VOCABULARY, 6, QuerySettings(prompt=(NQ, SEP)))
    assert ids == [[CLS, NQ, SEP, A, B, SEP], [CLS, NQ, SEP, SEP], [CLS, NQ, SEP, C, SEP]]
    # Without a limit nothing is cut, without a prompt nothing is added.
    named = QuerySettings(prompt=(NQ,))
    assert query_ids(texts, VOCABULARY, None, named)[0] == [CLS, NQ, A, B, C, SEP]
    assert query_ids(texts, VOCABULARY, 6)[0] == [CLS, A, B, C, SEP]
    assert query_ids(texts[:0], VOCABULARY, 6, named) == []


def test_a_prompt_that_eats_the_whole_length(tokenized, tmp_path):
    with pytest.raises(ConfigError, match="leaves no room") as error:
        query_ids(["a"], VOCABULARY, 4, QuerySettings(prompt=(NQ, SEP)))
    assert error.match("5 tokens or more")
    prompt = TaskPrompt(Prompt.NAME, name="a b c")
    retrieval.add_retrieval_task("toy_long", collection="toy", task="long", prompt=prompt)
    with pytest.raises(ConfigError, match=r"task 'toy_long', query length 6: the prompt of 4"):
        tokenized("toy_long")
    assert not tmp_path.joinpath("tokens", "passages").exists()
    with pytest.raises(ConfigError, match=r"length 9\n.*4 tokens or more beside the 6 of"):
        passage_ids([""], ["a"], VOCABULARY, 9, prompt=[NQ] * 6)


def test_each_task_has_its_own_length_and_prompt_in_a_token_store(tokenized):
    curly = QueryNormalization.CURLY_APOSTROPHE
    form = {"prompt": TaskPrompt(Prompt.NAME, name="NQ"), "normalization": curly}
    retrieval.add_retrieval_task("t_short", collection="toy", task="short", **form)
    retrieval.add_retrieval_task("t_long", collection="toy", task="long", query_length=12)
    retrieval.add_retrieval_mixture("t", ["t_short", ("t_long", 2.0)])
    store = tokenized("t")
    short, long = (store.queries(task, "train").tokens([0, 1]) for task in ("short", "long"))
    assert short.ids.tolist() == [[CLS, NQ, SEP, A, B, SEP]] * 2
    assert (long.ids.shape, np.sum(long.mask, 1).tolist()) == ((2, 12), [5, 12])
    assert long.ids[1].tolist() == [CLS, *[A, B, C] * 3, A, SEP]
    recorded = {
        entry.task: (entry.length, entry.normalization, entry.prompt)
        for entry in store.metadata.queries
    }
    assert recorded == {"short": (6, curly.value, (NQ, SEP)), "long": (12, "none", ())}

    # Another length of one task is another store.
    retrieval.add_retrieval_task("u_long", collection="toy", task="long", query_length=9)
    retrieval.add_retrieval_mixture("u", ["t_short", "u_long"])
    assert tokenized("u").queries("long", "train").ids.shape == (2, 9)
