"""Specialists of small token stores: summed word vectors, written as encoding does."""

import pathlib

import numpy as np

from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Tokens
from taser_jax.retrieval.encoding import encode_texts
from taser_jax.retrieval.index import build_index


def write_specialist(
    directory: pathlib.Path, store: TokenStore, *, seed: int = 0, dim: int = 8
) -> pathlib.Path:
    """Embeddings of passages and queries, and their exact index; the embeddings' folder."""
    words = np.random.default_rng(seed).normal(size=(store.metadata.vocabulary_size, dim))

    def embed(tokens: Tokens) -> np.ndarray:
        summed = (words[np.asarray(tokens.ids)] * np.asarray(tokens.mask)[..., None]).sum(axis=1)
        return (summed / np.sqrt(dim)).astype(np.float32)

    fingerprints = {
        "model": f"model-{seed}",
        "collection": store.metadata.collection_fingerprint,
        "vocabulary": store.metadata.vocabulary_fingerprint,
        "passages": store.metadata.passages_fingerprint,
    }
    embeddings = directory / "embeddings"
    encode_texts(embed, store.passages, embeddings, fingerprints=fingerprints)
    for task, splits in store.tasks.items():
        for split in splits:
            queries = store.queries(task, split)
            encode_texts(embed, queries, embeddings, fingerprints=fingerprints, queries=queries)
    build_index(embeddings, directory / "index")
    return embeddings
