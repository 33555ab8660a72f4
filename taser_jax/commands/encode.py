"""`taser encode`: a collection's passages and its tasks' queries, as row-aligned embeddings."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

from taser_jax.assembly import text_sources
from taser_jax.assembly.data import query_sets
from taser_jax.assembly.model_directory import check_vocabulary, load_model, read_facts
from taser_jax.data.batches.stream import TextSource
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import keep_compiled_programs, wait_for_all, writes
from taser_jax.models.batch import Role
from taser_jax.retrieval.embeddings import EmbeddingDtype, Embeddings
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts
from taser_jax.storage.progress import phase


@writes("{output_dir}", kinds=[Embeddings.KIND])
def encode(
    *,
    model_dir: str,
    token_store: str,
    output_dir: str,
    config: EncodeConfig = EncodeConfig(),
    tasks: Sequence[str] | None = None,
    query_splits: Sequence[str] | None = None,
    step: int | None = None,
    augmentation_dir: str | None = None,
    documents: int = 10,
    shared_embeddings: str | None = None,
    states_dir: str | None = None,
    frozen_blocks: int | None = None,
    states_dtype: EmbeddingDtype = EmbeddingDtype.BFLOAT16,
) -> dict[str, str]:
    """Encodes all passages and queries; if interrupted, rerun the command to resume.

    `taser search` then needs no model. Hosts share the shards, and each returns
    when all are done.

    Args:
        model_dir: the trained model.
        token_store: tokens of the passages and queries.
        output_dir: the embeddings' directory; queries go to `queries/<task>.<split>/` in it.
        config: batches, shards, stored dtype of the passages.
        tasks: tasks of the queries; None means all of the token store.
        query_splits: splits of the queries; None means all, [] none.
        step: step of the checkpoint; None means the best one.
        augmentation_dir: documents of the queries, from `taser augment`; for models that fuse them.
        documents: documents fused with each query, K.
        shared_embeddings: embeddings by text that memories, encodings and trainings of one passage
            tower share, on one host; passages that it lacks are encoded into it. None encodes all.
        states_dir: states of the blocks that were frozen in the model's training, as `taser train`
            keeps them; None computes from tokens. States that are missing are made first.
        frozen_blocks: number of blocks that the states replace, for a model whose run.json does not
            record it.
        states_dtype: dtype of these states.

    Returns:
        Fingerprints of model, collection, vocabulary and the passages' tokens.

    Raises:
        ConfigError: a task or split that the token store does not have.
        FingerprintError: the tokens are of another vocabulary than the model's, or the directory
            holds embeddings of another model, collection or token store.
    """
    store = TokenStore.open(token_store)
    queries = query_sets(store, tasks, query_splits, splits_setting="encode.query_splits")
    keep_compiled_programs(model_dir)
    model = load_model(model_dir, step=step)
    check_vocabulary(model.vocabulary_dir, store)
    fingerprints = {
        "model": model.fingerprint,
        "collection": store.metadata.collection_fingerprint,
        "vocabulary": store.metadata.vocabulary_fingerprint,
        "passages": store.metadata.passages_fingerprint,
    }
    texts: TextSource = store
    augmentation: text_sources.QueryDocuments | None = None
    if augmentation_dir:
        augmentation = pkgutil.resolve_name(text_sources.QUERY_DOCUMENTS)(
            augmentation_dir, per_query=documents, config=model.model.config, store=store
        )
        texts, queries = augmentation, [augmentation.renamed(split) for split in queries]
    if states_dir:
        model = model.frozen(read_facts(model_dir).get("train_from_block", frozen_blocks or 0))
        texts = text_sources.frozen_texts(
            states_dir,
            dtype=states_dtype,
            model=model.model,
            params=model.params,
            store=store,
            queries=queries,
            augmentation=augmentation,
        )
    passages = texts.passages
    with phase("encode passages"):
        if shared_embeddings:
            shared = pkgutil.resolve_name(text_sources.SHARED_EMBEDDINGS)
            passages = shared.encoded_by(model, shared_embeddings, store, config=config)
        encode_texts(
            model.encode_fn(Role.PASSAGE),
            passages,
            output_dir,
            fingerprints=fingerprints,
            config=config,
            among_hosts=True,
            normalization=model.model.config.normalization,
        )
    with phase("encode queries"):
        for split in queries:
            encode_texts(
                model.encode_fn(Role.QUERY, task=split.task),
                texts.of_queries(split),
                output_dir,
                fingerprints=fingerprints,
                queries=split,
                config=config,
                among_hosts=True,
            )
        # No host may go on to the index before the last shard is written.
        wait_for_all("passages and queries encoded")
    return fingerprints
