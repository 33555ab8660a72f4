"""Mutated files of every format: each is read or refused with a message, never a traceback.

Changes are those that editors, disks, spreadsheets and other programs make. `launch/test.sh` takes
a sample; the slow run has more than 20,000 cases.
"""

import json
import pathlib
import re
from collections.abc import Iterable

import numpy as np
import pytest
from bert_checkpoints import CONFIG
from safetensors.numpy import save
from written_files import json_lines

from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_qrels, read_questions
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import wordpiece_tokenizer
from taser_jax.interop.bert_formats import bert_config
from taser_jax.interop.tensors import read_tensors
from taser_jax.retrieval.runs import read_trec_run
from taser_jax.storage.errors import TaserError

SAMPLE, MANY = 25, 1300


def rows(*lines: Iterable[str]) -> str:
    return "".join("\t".join(line) + "\n" for line in lines)


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
MESH = """<?xml version="1.0"?><DescriptorRecordSet><DescriptorRecord><ConceptList><Concept>
<ConceptUI>M1</ConceptUI><ConceptName><String>Oslo</String></ConceptName>
<ScopeNote>The capital.</ScopeNote></Concept></ConceptList></DescriptorRecord>
</DescriptorRecordSet>"""
TOPICS = """<?xml version="1.0"?><topics task="t"><topic number="1"><query>capital</query>
<question>the capital of Norway</question></topic></topics>"""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]
TOKENIZER = wordpiece_tokenizer({word: i for i, word in enumerate(WORDS)}, lower_case=True)
TENSORS = save({"encoder.weight": np.ones((3, 4), np.float32), "b": np.zeros(2, np.int64)})
RUN = "q0 Q0 p0 1 2.5 t\nq0 Q0 p2 2 1.5 t\nq1 Q0 p1 1 0.5 t\n"
ROWS = {"p0": 0, "p1": 1, "p2": 2}
CORPUS = [{"_id": f"d{i}", "title": "T", "text": f"text {i}"} for i in range(3)]
DPR = rows(("id", "text", "title"), ("1", "The capital.", "Oslo"), ("2", '"a ""b"""', "B"))
# Format -> name of the file, its content, and what reads it.
FORMATS = {
    "dpr passages": ("p.tsv", DPR, read_passages),
    "dpr json": ("t.json", json.dumps([QUESTION, QUESTION]), read_questions),
    "beir corpus": ("corpus.jsonl", json_lines(*CORPUS), read_passages),
    "kilt queries": ("k.jsonl", json_lines(KILT, {**KILT, "id": "q2"}), read_questions),
    "tsv passages": ("p.tsv", rows(("1", "text", "T"), ("2", "b", "")), read_passages),
    "qrels": ("q.tsv", "q1 0 p1 1\nq2 0 p2 0\n", read_qrels),
    "mesh": ("m.xml", MESH, read_passages),
    "topics": ("t.xml", TOPICS, read_questions),
    "run": ("t.trec", RUN, lambda path: [read_trec_run(path, ROWS.__getitem__)]),
    "safetensors": ("model.safetensors", TENSORS, lambda path: [read_tensors(path.parent)]),
    "config.json": ("config.json", json.dumps(CONFIG), lambda path: [bert_config(path.parent)]),
    "tokens": ("tokenizer.json", TOKENIZER.to_str(), lambda path: [load_vocabulary(path.parent)]),
}
TOKENS = (
    *b"\x00 \xff \xc3 \xef\xbb\xbf \xe2\x80\xa8 \xc2\xa0 \x0c \\ud800".split(b" "),
    *b"\t \n \r\n \n\n \" ' \\ , : { } [ ] < >".split(b" "),
    *b'null true NaN Infinity -1 0 1e999 3.5 [] {} "" &amp; &x; <!--'.split(b" "),
    *(b"9" * 25, b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"x" * 5000),
)


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """The content after one to three changes."""
    for _ in range(rng.integers(1, 4)):
        change = _CHANGES[rng.integers(len(_CHANGES))]
        content = change(content, int(rng.integers(len(content) + 1)), rng)
    return content


def _flip(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    return content[:at] + bytes([rng.integers(256)]) + content[at + 1 :]


def _insert(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    return content[:at] + TOKENS[rng.integers(len(TOKENS))] + content[at:]


def _delete(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    return content[:at] + content[at + int(rng.integers(1, 20)) :]


def _repeat(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    stop = at + int(rng.integers(1, 200))
    return content[:stop] + content[at:]


def _truncate(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    return content[:at]


def _exchange_lines(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[i] for i in rng.permutation(len(lines)))


def _put_for_a_value(content: bytes, at: int, rng: np.random.Generator) -> bytes:
    """One token between separators becomes another."""
    parts = re.split(rb"([,:])", content)
    parts[2 * rng.integers(len(parts) // 2 + 1)] = TOKENS[rng.integers(len(TOKENS))]
    return b"".join(parts)


_CHANGES = (_flip, _insert, _delete, _repeat, _truncate, _exchange_lines, _put_for_a_value)


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(MANY, marks=pytest.mark.release)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_read_or_refused(name: str, cases: int, tmp_path: pathlib.Path):
    file, written, read = FORMATS[name]
    content = written.encode() if isinstance(written, str) else written
    path = tmp_path / file
    path.write_bytes(content)
    list(read(path))
    rng = np.random.default_rng([len(name), *name.encode(), cases])
    refused = 0
    for _ in range(cases):
        changed = mutated(content, rng)
        path.write_bytes(changed)
        try:
            records = list(read(path))
        except TaserError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {changed!r}") from error
        else:
            if name in ("beir corpus", "kilt queries"):
                # Lines in are lines out: the others were named.
                assert len(records) == sum(bool(line.strip()) for line in changed.split(b"\n"))
    assert refused
