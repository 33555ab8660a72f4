"""JSON that is not what it should be, wherever a command reads it: file and field are named.

Each of these was a traceback.
"""

import json

import numpy as np
import pytest
from embedding_files import embedded

from taser_jax.assembly.data import MIXTURE_FILE, with_mixture_rates
from taser_jax.assembly.model_directory import read_facts
from taser_jax.assembly.run_record import text_settings
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.index import open_index
from taser_jax.storage.artifacts import write_json
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import read_json

DEEP, LONG = "[" * 1_000_000, '{"a": ' + "9" * 5000 + "}"


@pytest.mark.parametrize("text", [DEEP, LONG, '{"a": ' * 2000, "nul\0", "", "{", "\xff", "[1]"])
def test_what_is_no_object_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="latin1")
    message = "expected an object" if text == "[1]" else "not JSON"
    with pytest.raises(DataError, match=rf"a\.json: {message}"):
        read_json(tmp_path / "a.json")


def test_a_byte_order_mark_is_taken(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "é"}\r\n', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": "é"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_rows": "3"}, 'num_rows is "3": expected an integer'),
        ({"num_rows": 10**15}, "rows in .* shards, which are not all here"),
        ({"shard_rows": 0}, "an integer, 1 or more"),
        ({"dtype": "float8"}, "one of 'float32', 'bfloat16'"),
        ({"fingerprints": None}, "required field 'fingerprints'"),
    ],
)
def test_metadata_of_embeddings(tmp_path, changed, message):
    rows = np.zeros((3, 2), np.float32)
    assert len(Embeddings(embedded(tmp_path, rows))) == 3
    embedded(tmp_path, rows, **changed)
    with pytest.raises(DataError, match=rf"metadata\.json, field(.|\n)*{message}|{message}"):
        Embeddings(tmp_path)


SCANN = {"kind": "scann index", "effort": {}, "num_passages": 3, "config": {"shard_passages": 0}}


@pytest.mark.parametrize(
    "metadata",
    [
        {"kind": "exact index", "embeddings": 3},
        {"kind": "exact index", "embeddings": ".", "dim": "2"},
        pytest.param(SCANN, marks=pytest.mark.needs("scann")),
    ],
)
def test_metadata_of_indexes(tmp_path, metadata):
    write_json(tmp_path / "metadata.json", {"format_version": 1, "fingerprints": {}, **metadata})
    with pytest.raises(DataError, match=r"metadata\.json, field|required field"):
        open_index(tmp_path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([1], "expected an object"),
        ({"query_length": "32"}, 'query_length is "32"'),
        ({"passage_length": 0}, "an integer, 1 or more"),
        ({"query_prompt": {"t": 7}}, "field 'query_prompt"),
        ({"query_normalization": "all"}, "one of 'none', 'curly_apostrophe'"),
    ],
)
def test_facts_of_a_run(tmp_path, facts, message):
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=rf"run\.json(.|\n)*{message}"):
        text_settings(read_facts(tmp_path), "t")


def test_a_mixtures_file(tmp_path):
    store = TokenStore.__new__(TokenStore)
    store.directory = tmp_path
    (tmp_path / MIXTURE_FILE).write_text('{"weights": {"a": "1"}}')
    with pytest.raises(DataError, match=r"field 'weights\[...\]'"):
        with_mixture_rates(BatchingConfig(batch_size=1), store, {})
