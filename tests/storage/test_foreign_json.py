"""JSON that is not what it should be, wherever a command reads it: file and field are named.

Each of these was a traceback.
"""

import json

import numpy as np
import pytest

from taser_jax.assembly.data import MIXTURE_FILE, with_mixture_rates
from taser_jax.assembly.model_directory import read_facts
from taser_jax.assembly.run_record import text_settings
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.embeddings import Embeddings, write_embeddings
from taser_jax.retrieval.index import open_index
from taser_jax.storage.artifacts import METADATA, write_json
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


def embeddings(directory, changed):
    write_embeddings(directory, np.zeros((3, 2), np.float32), {"model": "m"}, "none")
    assert len(Embeddings(directory)) == 3
    write_json(directory / METADATA, read_json(directory / METADATA) | changed)
    Embeddings(directory)


def index(directory, metadata):
    common = {"format_version": 1, "fingerprints": {}}
    write_json(directory / METADATA, common | metadata)
    open_index(directory)


def facts(directory, value):
    (directory / "run.json").write_text(json.dumps(value))
    text_settings(read_facts(directory), "t")


def mixture(directory, value):
    store = TokenStore.__new__(TokenStore)
    store.directory = directory
    (directory / MIXTURE_FILE).write_text(json.dumps(value))
    with_mixture_rates(BatchingConfig(batch_size=1), store, {})


SCANN = {"kind": "scann index", "effort": {}, "num_passages": 3, "config": {"shard_passages": 0}}


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (embeddings, {"num_rows": "3"}, 'metadata.*: num_rows is "3": expected an integer'),
        (embeddings, {"num_rows": 10**15}, "metadata.* rows in .* shards, which are not all here"),
        (embeddings, {"shard_rows": 0}, "metadata.*: shard_rows is 0: .* integer, 1 or more"),
        (embeddings, {"dtype": "float8"}, "metadata.*: dtype .* one of 'float32', 'bfloat16'"),
        (embeddings, {"fingerprints": None}, "metadata.* required field 'fingerprints'"),
        (index, {"kind": "exact index", "embeddings": 3}, "metadata.*: embeddings is 3: "),
        (index, {"kind": "exact index", "embeddings": ".", "dim": "2"}, 'metadata.*: dim is "2": '),
        pytest.param(index, SCANN, "metadata.*: effort is .*", marks=pytest.mark.needs("scann")),
        (facts, [1], "run.json: expected an object"),
        (facts, {"query_length": "32"}, 'run.*: query_length is "32": expected an integer'),
        (facts, {"passage_length": 0}, "run.*: passage_length is 0: .* an integer, 1 or more"),
        (facts, {"query_prompt": {"t": 7}}, "run.*, field 'query_prompt"),
        (facts, {"query_normalization": "all"}, "run.* one of 'none', 'curly_apostrophe'"),
        (mixture, {"weights": {"a": "1"}}, r"mixture.*, field 'weights\[...\]'"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, read, value, message):
    with pytest.raises(DataError, match=f"^{tmp_path}/{message}"):
        read(tmp_path, value)
