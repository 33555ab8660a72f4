"""MTEB's evaluation of our model, and of the same weights in sentence-transformers."""

import json

import numpy as np
import pytest
from capitals import PASSAGES, mteb_task

from taser_jax import Passage, Retriever
from taser_jax.serving.mteb import MtebEncoder

pytestmark = pytest.mark.slow

# Query -> text, relevant passage; titles decide some, texts the others.
QUERIES = {
    "q0": ("the capital of Italy", "p3"),
    "q1": ("which river flows through Paris?", "p1"),
    "q2": ("a board game", "p7"),
    "q4": ("cities of Europe", "p6"),
    "q3": ("a large city that is no capital, in France", "p2"),
}
BATCH = {
    "text": [f"{title} {text}" for title, text in PASSAGES.values()],
    "title": [title for title, _ in PASSAGES.values()],
    "body": [text for _, text in PASSAGES.values()],
}


@pytest.fixture(scope="module")
def encoder(minilm) -> MtebEncoder:
    return MtebEncoder(Retriever.from_pretrained(minilm), name="minilm")


def make_task():
    texts = {id: text for id, (text, _) in QUERIES.items()}
    relevant = {id: {passage: 1} for id, (_, passage) in QUERIES.items()}
    return mteb_task("Capitals", PASSAGES, texts, relevant)


def test_mteb_measures_what_it_measures_of_the_same_weights(encoder, minilm, tmp_path):
    import mteb
    from sentence_transformers import SentenceTransformer

    cache = mteb.ResultCache(tmp_path / "results")
    (ours,) = mteb.evaluate(encoder, make_task(), cache=cache).task_results
    theirs = SentenceTransformer(str(minilm), device="cpu")
    (reference,) = mteb.evaluate(theirs, make_task(), cache=None).task_results
    assert 0.5 < ours.get_score() < 1
    for measure in ("ndcg_at_10", "mrr_at_10"):
        assert ours.scores["test"][0][measure] == reference.scores["test"][0][measure]
    (written,) = (tmp_path / "results").rglob("Capitals.json")
    assert json.loads(written.read_text())["task_name"] == "Capitals"
    (meta,) = (tmp_path / "results").rglob("model_meta.json")
    facts = json.loads(meta.read_text())
    assert (facts["name"], facts["embed_dim"]) == ("taser_jax/minilm", 384)
    assert facts["similarity_fn_name"] == "dot"


def test_titles_and_bodies_are_encoded_as_passages(encoder):
    from mteb.types import PromptType

    where = {"task_metadata": None, "hf_split": "test", "hf_subset": "default"}
    passages = [Passage(id="", title=title, text=text) for title, text in PASSAGES.values()]
    ours = encoder._retriever
    of_batches = encoder.encode([BATCH, BATCH], **where, prompt_type=PromptType.document)
    expected = ours.encode_passages(passages)
    np.testing.assert_allclose(of_batches, np.concatenate([expected, expected]), atol=1e-5)
    # As sentence-transformers reads a title and a text.
    np.testing.assert_allclose(expected, ours.encode_passages(BATCH["text"]), atol=1e-5)
    texts = encoder.encode([{"text": ["a river"]}], **where, prompt_type=PromptType.query)
    np.testing.assert_allclose(texts, ours.encode_queries(["a river"]), atol=1e-6)
