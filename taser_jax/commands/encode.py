"""`taser encode`: a collection's passages into row-aligned embedding shards."""

from __future__ import annotations

import dataclasses

import jax

from taser_jax.assembly.model_directory import check_vocabulary, load_model
from taser_jax.batch import Role
from taser_jax.data.token_store.store import TokenStore
from taser_jax.hosts import wait_for_all
from taser_jax.progress import phase
from taser_jax.retrieval.embeddings import EncodeConfig, encode_passages


def encode(
    *,
    model_dir: str,
    token_store: str,
    output_dir: str,
    config: EncodeConfig = EncodeConfig(),
    step: int | None = None,
) -> dict[str, str]:
    """Encodes all passages; rerun after a kill, it goes on at the shard it was in.

    On several hosts each takes its share of the shards, and all return when all are done.

    Args:
        model_dir: the trained model.
        token_store: tokens of the passages.
        output_dir: the embeddings' directory.
        config: batches, shards, stored dtype.
        step: which checkpoint; None means the best one.

    Returns:
        Fingerprints of model, collection and vocabulary.

    Raises:
        FingerprintError: the tokens are of another vocabulary than the model's, or the directory
            holds embeddings of another model or collection.
    """
    store = TokenStore.open(token_store)
    model = load_model(model_dir, step=step)
    check_vocabulary(model, store)
    fingerprints = {
        "model": model.fingerprint,
        "collection": store.metadata.collection_fingerprint,
        "vocabulary": store.metadata.vocabulary_fingerprint,
    }
    with phase("encode passages"):
        encode_passages(
            model.encode_fn(Role.PASSAGE),
            store.passages,
            output_dir,
            fingerprints=fingerprints,
            config=dataclasses.replace(config, batch_multiple=model.batch_multiple),
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        # No host goes on to the index before the last shard is written.
        wait_for_all("passages encoded")
    return fingerprints


CONFIGURABLES = (EncodeConfig,)
