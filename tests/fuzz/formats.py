"""A small valid file of every format, and what reads it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable

import numpy as np
from bert_checkpoints import CONFIG
from safetensors.numpy import save

from taser_jax.data.readers.fields import read_qrels
from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_kilt, read_questions
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import wordpiece_tokenizer
from taser_jax.interop.bert_formats import bert_config
from taser_jax.interop.tensors import read_tensors
from taser_jax.retrieval.runs import read_trec_run

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
TENSORS = save({"encoder.weight": np.ones((3, 4), np.float32), "b": np.zeros(2, np.int64)})
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]
BERT = json.dumps(CONFIG).encode()
TOKENIZER = wordpiece_tokenizer({word: i for i, word in enumerate(WORDS)}, lower_case=True)
RUN = b"q0 Q0 p0 1 2.5 t\nq0 Q0 p2 2 1.5 t\nq1 Q0 p1 1 0.5 t\n"

Read = Callable[[pathlib.Path], object]
# Format -> (name of the file, its content, what reads it).
FORMATS: dict[str, tuple[str, bytes, Read]] = {
    "dpr passages": (
        "p.tsv",
        rows(("id", "text", "title"), ("1", "The capital.", "Oslo"), ("2", '"a ""b"""', "B")),
        lambda path: list(read_passages(path)),
    ),
    "dpr json": (
        "t.json",
        json.dumps([QUESTION, QUESTION]).encode(),
        lambda path: list(read_questions(path)),
    ),
    "beir corpus": (
        "corpus.jsonl",
        jsonl(*({"_id": f"d{i}", "title": "T", "text": f"text {i}"} for i in range(3))),
        lambda path: list(read_passages(path)),
    ),
    "kilt queries": (
        "k.jsonl",
        jsonl(KILT, {**KILT, "id": "q2"}),
        lambda p: list(read_kilt(p)),
    ),
    "tsv passages": (
        "p.tsv",
        rows(("1", "text", "T"), ("2", "b", "")),
        lambda p: list(read_passages(p)),
    ),
    "qrels": ("q.tsv", b"q1 0 p1 1\nq2 0 p2 0\n", lambda path: list(read_qrels(path))),
    "mesh": ("m.xml", MESH, lambda path: list(read_passages(path))),
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
        lambda path: load_vocabulary(path.parent),
    ),
}
