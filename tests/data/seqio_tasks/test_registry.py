import pathlib
import runpy

import pytest
import seqio

from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.seqio_tasks import registry as retrieval
from taser_jax.data.seqio_tasks.retrieval_task import use_data
from taser_jax.data.text.preprocessors import Prompt, QueryNormalization, TaskPrompt, Titles
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "'", "find"]
VOCABULARY = WordPieceVocabulary(PIECES)
TASK_FILES = pathlib.Path(__file__).resolve().parents[3] / "tasks"

pytestmark = pytest.mark.usefixtures("empty_registries")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    data_dir = str(tmp_path_factory.mktemp("data"))
    write_collection(data_dir, "toy", [Passage(str(i), "a b c", "t" * (i % 2)) for i in range(6)])
    for task, split, count in (("one", "train", 3), ("two", "train", 5), ("two", "test", 2)):
        queries = [
            Query(f"{task}{i}", f"a’{'b ' * i}", task, (i, 5)[: 1 + i % 2], (), (4,) * i)
            for i in range(count)
        ]
        write_queries(data_dir, "toy", task, split, queries)
    return data_dir


def test_examples_of_a_task(data_dir):
    curly = QueryNormalization.CURLY_APOSTROPHE
    retrieval.add_retrieval_task("toy_one", collection="toy", task="one", normalization=curly)
    with use_data(data_dir=data_dir, vocabulary=VOCABULARY):
        task = seqio.get_mixture_or_task("toy_one")
        dataset = task.get_dataset({"query": 5}, split="train", shuffle=False)
        assert task.num_input_examples("train") == 3
        assert tuple(task.splits) == ("train",)
    # The data set outlives the context that it was made in.
    examples = list(dataset)
    a, b, quote = PIECES.index("a"), PIECES.index("b"), PIECES.index("'")
    token_ids = [example["query"].numpy().tolist() for example in examples]
    assert token_ids == [[2, a, quote, 3], [2, a, quote, b, 3], [2, a, quote, b, 3]]
    last = {name: value.numpy() for name, value in examples[1].items()}
    assert (last["query_id"], last["query_row"]) == (b"one1", 1)
    assert last["query_pretokenized"].decode() == "a’b "
    assert (last["positives"].tolist(), last["hard_negatives"].tolist()) == ([1, 5], [4])


def test_seqio_mixes_and_states_rates(data_dir):
    retrieval.add_retrieval_task("toy_one", collection="toy", task="one")
    retrieval.add_retrieval_task("toy_two", collection="toy", task="two")
    retrieval.add_retrieval_mixture("both", [("toy_one", 2.0), "toy_two"], default_rate=1.0)
    assert seqio.MixtureRegistry.get("both").total_rate == 3.0
    assert retrieval.find_mixture("both").weights() == {"one": 2.0, "two": 1.0}
    by_size = ["toy_one", ("toy_two", seqio.mixing_rate_num_examples)]
    retrieval.add_retrieval_mixture("by_size", by_size, default_rate=1.0)
    with use_data(data_dir=data_dir, vocabulary=VOCABULARY):
        assert retrieval.find_mixture("by_size").weights() == {"one": 1.0, "two": 5.0}
        add = seqio.MixtureRegistry.add
        add("seqios", ["toy_one", ("toy_two", 2.0)], default_rate=seqio.mixing_rate_num_examples)
        assert retrieval.find_mixture("seqios").weights() == {"one": 3.0, "two": 2.0}
        both = seqio.get_mixture_or_task("both")
        mixed = both.get_dataset({"query": 8}, split="train", shuffle=False, num_epochs=1)
        assert sum(1 for _ in mixed) > 3
    assert retrieval.find_mixture("toy_two").weights() == {"two": 1.0}


def test_names_that_are_not_registered():
    with pytest.raises(ConfigError, match="none is registered"):
        retrieval.find_mixture("toy")
    retrieval.add_retrieval_task("toy_one", collection="toy", task="one")
    retrieval.add_retrieval_mixture("toy_mixture", ["toy_one"])
    with pytest.raises(ConfigError, match="did you mean toy_mixture"):
        retrieval.find_mixture("toy_mixtrue")
    with pytest.raises(ConfigError, match="did you mean toy_one"):
        retrieval.find_mixture("toy_on").weights()
    with pytest.raises(ConfigError, match=r"(?s)mixture 'toy': no .*'toy_on'.*mean toy_one"):
        retrieval.add_retrieval_mixture("toy", ["toy_one", ("toy_on", 1.0)])
    with pytest.raises(ConfigError, match="no task"):
        retrieval.add_retrieval_mixture("toy", [])
    with pytest.raises(ConfigError, match="4 tokens or more"):
        retrieval.add_retrieval_task("toy_two", collection="toy", query_length=3)


def add_task_of_seqio(name):
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, ["train"])
    seqio.TaskRegistry.add(name, source=source, preprocessors=[], output_features={})


def test_a_name_is_registered_once():
    retrieval.add_retrieval_task("toy_one", collection="toy", task="one")
    with pytest.raises(ConfigError, match="'toy_one' is registered already"):
        retrieval.add_retrieval_task("toy_one", collection="toy", task="two")
    retrieval.remove("toy_one")
    assert "toy_one" not in seqio.TaskRegistry.names()
    retrieval.add_retrieval_task("toy_one", collection="toy", task="two")
    with pytest.raises(ConfigError, match="each task once"):
        retrieval.add_retrieval_mixture("toy", ["toy_one", ("toy_one", 2.0)])
    add_task_of_seqio("texts")
    with pytest.raises(ConfigError, match="'texts' is registered already"):
        retrieval.add_retrieval_task("texts", collection="toy")


def test_mixtures_that_cannot_be_trained_on():
    for name in ("a", "again"):
        retrieval.add_retrieval_task(name, collection="x", task="t")
    retrieval.add_retrieval_mixture("twice", ["a", "again"])
    with pytest.raises(ConfigError, match="'a' and 'again' are the same queries"):
        retrieval.find_mixture("twice")
    retrieval.add_retrieval_task("b", collection="y", task="t")
    retrieval.add_retrieval_mixture("land", ["a", "b"])
    with pytest.raises(ConfigError, match="tasks are of 2 collections, x, y"):
        retrieval.find_mixture("land")
    add_task_of_seqio("texts")
    seqio.MixtureRegistry.add("more", ["texts"], default_rate=1.0)
    with pytest.raises(ConfigError, match="'texts' is not a retrieval task"):
        retrieval.find_mixture("more")


def test_task_files_register_without_data():
    for name in ("pydocs", "open_qa", "template"):
        runpy.run_path(str(TASK_FILES / f"{name}.py"))
    pydocs = retrieval.find_mixture("pydocs").tasks
    names = {"summary", "parameter", "example", "code", "see_also", "lookup"}
    assert {task.query_set for task in pydocs} == names
    open_qa = retrieval.find_mixture("open_qa").tasks
    assert [task.name for task in open_qa] == ["open_qa_nq", "open_qa_squad"]
    assert tuple(pydocs[0].splits) == ("train", "validation", "test")
    assert retrieval.find_mixture("my_mixture").weights() == {"questions": 2.0, "claims": 1.0}


@pytest.mark.parametrize("module", ["kilt", "kilt_mini"])
def test_kilts_task_files(module):
    names = runpy.run_path(str(TASK_FILES / f"{module}.py"))["TASKS"]
    lengths = {task: length for task, (_, _, length) in names.items()}
    for mixture in (module, f"{module}_name", f"{module}_name_t5", f"{module}_marker"):
        tasks = retrieval.find_mixture(mixture).tasks
        assert {task.query_set: task.query_length for task in tasks} == lengths
        assert {task.collection for task in tasks} == {module}
        prompts = {task.query_set: task.prompt for task in tasks}
        kind = {module: Prompt.NONE, f"{module}_marker": Prompt.MARKER}.get(mixture, Prompt.NAME)
        assert {prompt.kind for prompt in prompts.values()} == {kind}
        separator = "<extra_id_1>" if mixture.endswith("t5") else None
        assert {prompt.separator for prompt in prompts.values()} == {separator}
        assert len({prompt.name for prompt in prompts.values()}) == len(lengths)
        assert len({prompt.family for prompt in prompts.values()}) == (5 if module == "kilt" else 4)


def test_a_collection_as_it_is_takes_titles_as_its_vocabulary_says(data_dir):
    mixture = retrieval.mixture_of_collection(data_dir, "toy", titles=Titles.JOIN)
    assert [task.name for task in mixture.tasks] == ["toy.one", "toy.two"]
    assert retrieval.form_of_passages("toy", mixture) == (Titles.JOIN, TaskPrompt())
    assert retrieval.form_of_passages("toy") == (Titles.INCLUDE, TaskPrompt())
    # Those that a module registered keep their form.
    retrieval.add_passages("toy", titles=Titles.OMIT)
    assert retrieval.form_of_passages("toy", mixture) == (Titles.OMIT, TaskPrompt())
