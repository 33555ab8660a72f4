"""Mutated files of every format: each is read or refused with a message, never a traceback.

`launch/test.sh` takes a sample; the slow run has more than 20,000 cases.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import tiny_training
from bert_checkpoints import CONFIG
from mutations import mutated
from safetensors.numpy import save

from taser_jax import checksums, cli
from taser_jax.artifacts import read_metadata
from taser_jax.data.readers import beir, dpr, kilt, mesh, thesaurus, tsv
from taser_jax.data.text.bert_files import WordSplitting, read_bert_files
from taser_jax.data.text.wordpiece import wordpiece_tokenizer
from taser_jax.data.token_store.negatives import read_negatives, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import TaserError
from taser_jax.interop.bert import bert_config
from taser_jax.interop.tensors import read_tensors
from taser_jax.retrieval.runs import read_trec_run

SAMPLE, MANY = 25, 1300
ROWS = {"p0": 0, "p1": 1, "p2": 2}


def jsonl(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def rows(*lines: Iterable[str]) -> bytes:
    return "".join("\t".join(line) + "\n" for line in lines).encode()


CONTEXT = {"title": "Oslo", "text": "The capital of Norway.", "passage_id": "7"}
QUESTION = {
    "question": "capital of norway",
    "answers": ["Oslo", "Christiania"],
    "positive_ctxs": [CONTEXT],
    "negative_ctxs": [],
    "hard_negative_ctxs": [{**CONTEXT, "passage_id": "8"}],
}
KILT = {
    "id": "q1",
    "input": "capital of norway",
    "output": [{"answer": "Oslo", "provenance": [{"wikipedia_id": "7", "title": "Oslo"}]}],
}
MESH = b"""<?xml version="1.0"?><DescriptorRecordSet><DescriptorRecord><ConceptList><Concept>
<ConceptUI>M1</ConceptUI><ConceptName><String>Oslo</String></ConceptName>
<ScopeNote>The capital.</ScopeNote></Concept></ConceptList></DescriptorRecord>
</DescriptorRecordSet>"""
OBO = b'format-version: 1.2\n\n[Term]\nid: X:1\nname: oslo\ndef: "The capital." [a:b]\n'
TENSORS = save({"encoder.weight": np.ones((3, 4), np.float32), "b": np.zeros(2, np.int64)})
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]
BERT = json.dumps(CONFIG).encode()
TOKENIZER = wordpiece_tokenizer({word: i for i, word in enumerate(WORDS)}, WordSplitting())
RUN = b"q0 Q0 p0 1 2.5 t\nq0 Q0 p2 2 1.5 t\nq1 Q0 p1 1 0.5 t\n"
METADATA = json.dumps({"kind": "embeddings", "format_version": 1, "num_rows": 3}).encode()
GIN = b"TRAIN_STEPS = 3\nLoopConfig.log_period = 5\n# a comment\nTASKS = ['a', 'b']\n"

Read = Callable[[pathlib.Path], object]
# Format -> (name of the file, its content, what reads it).
FORMATS: dict[str, tuple[str, bytes, Read]] = {
    "dpr passages": (
        "p.tsv",
        rows(("id", "text", "title"), ("1", "The capital.", "Oslo"), ("2", '"a ""b"""', "B")),
        lambda path: list(dpr.read_passages(path)),
    ),
    "dpr json": (
        "t.json",
        json.dumps([QUESTION, QUESTION]).encode(),
        lambda path: list(dpr.read_training(path)),
    ),
    "dpr jsonl": ("t.jsonl", jsonl(QUESTION, QUESTION), lambda p: list(dpr.read_training(p))),
    "qa.csv": (
        "t.qa.csv",
        b"capital of norway\t['Oslo', \"O's\"]\nwho\t\"['a ''b''']\"\n",
        lambda path: list(dpr.read_questions(path)),
    ),
    "beir corpus": (
        "corpus.jsonl",
        jsonl(*({"_id": f"d{i}", "title": "T", "text": f"text {i}"} for i in range(3))),
        lambda path: list(beir.read_passages(path.parent)),
    ),
    "beir queries": (
        "queries.jsonl",
        jsonl(*({"_id": f"q{i}", "text": f"question {i}"} for i in range(3))),
        lambda path: list(beir.read_queries(path.parent)),
    ),
    "kilt queries": (
        "k.jsonl",
        jsonl(KILT, {**KILT, "id": "q2"}),
        lambda p: list(kilt.read_queries(p)),
    ),
    "kilt pages": (
        "k.jsonl",
        jsonl({"wikipedia_id": "7", "wikipedia_title": "Oslo", "text": ["Oslo", "The capital."]}),
        lambda path: list(kilt.read_pages(path)),
    ),
    "kilt passages": (
        "p.tsv",
        rows(("id", "text", "title", "wikipedia_id"), ("1", "The capital.", "Oslo", "7")),
        lambda path: list(kilt.read_passages(path)),
    ),
    "tsv passages": (
        "p.tsv",
        rows(("1", "text", "T"), ("2", "b", "")),
        lambda p: list(tsv.read_passages(p)),
    ),
    "tsv queries": (
        "q.tsv",
        rows(("1", "what"), ("2", "who")),
        lambda p: list(tsv.read_queries(p)),
    ),
    "qrels": ("q.tsv", b"q1 0 p1 1\nq2 0 p2 0\n", lambda path: list(tsv.read_qrels(path))),
    "beir qrels": (
        "q.tsv",
        rows(("query-id", "corpus-id", "score"), ("q1", "p1", "1"), ("q2", "p2", "2")),
        lambda path: list(tsv.read_qrels(path)),
    ),
    "thesaurus": (
        "t.jsonl",
        jsonl({"name": "oslo", "definition": "The capital.", "id": "1"}),
        lambda path: list(thesaurus.read_passages(path)),
    ),
    "obo": ("t.obo", OBO, lambda path: list(thesaurus.read_passages(path))),
    "mesh": ("m.xml", MESH, lambda path: list(mesh.read_passages(path))),
    "run": (
        "t.test.trec",
        RUN,
        lambda path: read_trec_run(path, ROWS.__getitem__),
    ),
    "safetensors": ("model.safetensors", TENSORS, lambda path: read_tensors(path.parent)),
    "config.json": (
        "config.json",
        json.dumps(CONFIG).encode(),
        lambda path: bert_config(path.parent),
    ),
    "tokenizer.json": (
        "tokenizer.json",
        TOKENIZER.to_str().encode(),
        lambda path: read_bert_files(path.parent),
    ),
    "vocab.txt": (
        "vocab.txt",
        "\n".join(WORDS).encode(),
        lambda path: read_bert_files(path.parent),
    ),
    "metadata": ("metadata.json", METADATA, lambda p: read_metadata(p.parent, "embeddings", 1)),
}


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_read_or_refused(name: str, cases: int, tmp_path: pathlib.Path):
    file, content, read = FORMATS[name]
    path = tmp_path / file
    path.write_bytes(content)
    read(path)
    rng = np.random.default_rng([len(name), *name.encode(), cases])
    refused = 0
    for _ in range(cases):
        changed = mutated(content, rng)
        path.write_bytes(changed)
        try:
            found = read(path)
        except TaserError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {changed!r}") from error
        else:
            if name in ("beir corpus", "beir queries", "kilt queries"):
                # Lines in are lines out: the others were named.
                assert len(found) == sum(bool(line.strip()) for line in changed.split(b"\n"))
    assert refused


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_mutated_token_store_is_read_or_refused(
    recorded: bool, cases: int, tmp_path: pathlib.Path
):
    tiny_training.write_token_store(tmp_path / "whole")
    rng = np.random.default_rng([cases, recorded])
    files = sorted(
        path.relative_to(tmp_path / "whole")
        for path in (tmp_path / "whole").rglob("*")
        if path.is_file() and path.name != checksums.FILE
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "changed")
    if not recorded:
        (tmp_path / "changed" / checksums.FILE).unlink()
    for _ in range(cases):
        name = files[rng.integers(len(files))]
        content = (tmp_path / "whole" / name).read_bytes()
        changed = mutated(content, rng)
        (tmp_path / "changed" / name).write_bytes(changed)
        refused = False
        try:
            store = TokenStore.open(tmp_path / "changed")
            for entry in store.metadata.queries:
                store.queries(entry.task, entry.split)
        except TaserError:
            refused = True
        except Exception as error:
            raise AssertionError(f"{name}: {changed!r}") from error
        assert refused or not recorded or changed == content, (name, changed)
        (tmp_path / "changed" / name).write_bytes(content)


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_negatives_are_read_or_refused(cases: int, tmp_path: pathlib.Path):
    path = write_negatives(
        tmp_path,
        "t",
        "train",
        query_ids=["q0", "q1"],
        rows=[[1, 2], [0]],
        scores=[[2.0, 1.0], [0.5]],
        metadata={"collection_fingerprint": "c", "source": "s"},
    )
    content = path.read_bytes()
    (tmp_path / checksums.FILE).unlink()
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        changed = mutated(content, rng)
        path.write_bytes(changed)
        try:
            read_negatives(tmp_path, "t", "train", ["q0", "q1"])
        except TaserError:
            pass
        except Exception as error:
            raise AssertionError(repr(changed)) from error


@pytest.mark.parametrize("cases", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_mutated_gin_file_is_refused(cases: int, tmp_path: pathlib.Path, capsys):
    path = tmp_path / "x.gin"
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        path.write_bytes(mutated(GIN, rng))
        # Required paths are missing in any case.
        assert cli.run(["evaluate", f"--gin_file={path}"]) == 2, path.read_bytes()
        capsys.readouterr()
