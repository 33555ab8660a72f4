import functools
import os
import re
import subprocess
import sys

import pytest

from taser_jax.data.pydocs import walk
from taser_jax.data.pydocs.build import TASKS, build_pydocs, find_leaks
from taser_jax.data.pydocs.walk import module_names, standard_library_roots
from taser_jax.storage.errors import DataError

built = functools.cache(build_pydocs)
SMALL = ("json", "statistics", "optax")
CHECKSUM = (
    "from taser_jax.data.pydocs.build import build_pydocs;"
    f"print('checksum', build_pydocs({SMALL!r}).checksum)"
)


def test_checksum_does_not_depend_on_process_hash_seed_or_environment(tmp_path):
    path = os.pathsep.join(p for p in sys.path if p) or os.getcwd()
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": path}
    environment |= {"TZ": "Asia/Tokyo", "COLUMNS": "40", "HTTP_PROXY": "secret"}
    command = [sys.executable, "-c", CHECKSUM]
    told = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
    assert told == f"checksum {built(SMALL).checksum}\n"


def test_a_missing_package_is_reported():
    with pytest.raises(DataError, match="no_such_package_here"):
        build_pydocs(("json", "no_such_package_here"))


def test_modules_with_side_effects_are_never_walked():
    roots = standard_library_roots()
    assert not {"antigravity", "this", "turtle", "tkinter", "idlelib", "test"} & set(roots)
    assert {"json", "os", "asyncio", "builtins"} <= set(roots)
    names = module_names("asyncio")
    assert "asyncio.queues" in names
    assert "asyncio.__main__" not in names
    assert not [n for n in module_names("optax") if "contrib" in n or "experimental" in n]


def test_small_collection_is_complete():
    small = built(SMALL)
    names = {p.page_id for p in small.passages}
    assert {"json.dumps", "statistics.median", "optax.adam"} <= names
    assert set(small.versions) == {"python", "numpy", "jax", "flax", "optax"}
    assert list(small.queries) == list(TASKS)
    assert all(list(s) == ["train", "validation", "test"] for s in small.queries.values())
    assert len(small.queries["code"]["train"]) > 30
    assert len(small.queries["lookup"]["train"]) > 100


@pytest.mark.release
def test_full_collection_has_the_expected_size():
    full = built()
    assert 8_000 < len(full.passages) < 13_000
    train = {task: len(splits["train"]) for task, splits in full.queries.items()}
    test = {task: len(splits["test"]) for task, splits in full.queries.items()}
    assert 5_500 < sum(train.values()) - train["lookup"] < 9_500
    assert min(train.values()) > 400
    assert min(test.values()) > 100
    assert {walk.package_of(passage.page_id) for passage in full.passages} == set(full.versions)
    lengths = sorted(len(passage.text.split()) for passage in full.passages)
    assert lengths[9 * len(lengths) // 10] <= 110


@pytest.fixture(params=["small", pytest.param("full", marks=pytest.mark.release)])
def collection(request):
    return built(SMALL) if request.param == "small" else built()


def _all_queries(collection, splits=("train", "validation", "test")):
    return [q for of in collection.queries.values() for split in splits for q in of[split]]


def test_ids_are_unique_and_positives_are_rows(collection):
    ids = [p.id for p in collection.passages]
    assert len(set(ids)) == len(ids)
    assert not [i for i in ids if re.search(r"\s", i)]
    queries = _all_queries(collection)
    assert len({(query.task, query.id) for query in queries}) == len(queries)
    for query in queries:
        assert query.id.partition(":")[0] in collection.versions
        assert query.text.strip()
        assert not re.search(r"\s", query.id)
        assert query.positives
        assert len(set(query.positives)) == len(query.positives)
        assert max(query.positives) < len(collection.passages)


def test_no_page_of_a_held_out_query_is_trained_on(collection):
    def pages(*splits):
        queries = _all_queries(collection, splits)
        return {collection.passages[row].page_id for query in queries for row in query.positives}

    trained, held_out = pages("train"), pages("validation", "test")
    assert held_out
    assert not trained & held_out


def test_no_query_of_five_words_stands_in_a_passage(collection):
    queries = [q for q in _all_queries(collection) if q.task != "lookup"]
    # Of a parameter neither the query nor its description alone.
    texts = [q.text for q in queries]
    texts += [q.text.partition(": ")[2] for q in queries if q.task == "parameter"]
    assert find_leaks(texts, [f"{p.title} {p.text}" for p in collection.passages]) == []


def test_nothing_of_the_machine_is_in_the_text(collection):
    private = [os.path.expanduser("~"), sys.prefix, os.getcwd()]
    for entry in (*collection.passages, *_all_queries(collection)):
        assert not re.search(r" at 0x[0-9a-f]{6,}", entry.text), entry
        assert not [p for p in private if len(p) > 1 and p in entry.text], entry
