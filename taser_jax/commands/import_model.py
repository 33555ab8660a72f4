"""`taser import`: a model directory from pretrained weights; embeddings from files of Parquet."""

from __future__ import annotations

import functools
import pathlib
import types
from collections.abc import Mapping

import jax

from taser_jax.assembly.data import check_lengths
from taser_jax.assembly.model_directory import (
    MODEL_FILE,
    VOCABULARY,
    read_config_text,
    read_facts,
    read_model_config,
    write_model,
)
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.text.preprocessors import check_length
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.devices.hosts import writes
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.interop.hub import fetch, read_prompts, recorded_name, text_facts, weights_digest
from taser_jax.interop.pretrained import (
    Pretrained,
    drawn_without,
    place_pretrained,
    read_pretrained,
)
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig
from taser_jax.models.parameters import abstract_params, init_params, parameter_count
from taser_jax.retrieval import embedding_files
from taser_jax.storage.artifacts import MODEL, check_empty, replacing
from taser_jax.storage.progress import logger, phase
from taser_jax.training.state import named_key


@writes("{model_dir}", kinds=[MODEL])
def import_model(
    *,
    model_dir: str,
    model: ModelConfig,
    pretrained: Pretrained,
    vocabulary: str | None = None,
    feature_lengths: Mapping[str, int] = types.MappingProxyType({"query": 32, "passage": 256}),
    seed: int = 0,
    config_text: str = "",
) -> int:
    """Makes a model directory from pretrained weights, without training.

    `model_dir` is what `taser train` would leave at step 0: `taser encode`, `ask` and `export` read
    it, and `taser train` can start from its checkpoint_0 (INITIAL_CHECKPOINT_PATH).

    Args:
        model_dir: directory of the new model; must not contain another one.
        model: the dual encoder; every tower and expert becomes a copy of the pretrained encoder.
        pretrained: the weights.
        vocabulary: vocabulary for tokenising; None takes the checkpoint's own.
        feature_lengths: {"query": ..., "passage": ...}, in tokens; recorded for exports.
        seed: seed of parameters that the checkpoint lacks (routers).
        config_text: written to config.gin.

    Returns:
        Number of parameters.

    Raises:
        ConfigError: sizes or vocabularies differ, or the directory has another model.
        DataError: missing or damaged files.
    """
    check_lengths(feature_lengths)
    for length in feature_lengths.values():
        check_length(length)
    directory = pathlib.Path(model_dir)
    sources = [fetch(pretrained.source)]
    if pretrained.passage_source is not None:
        sources.append(fetch(pretrained.passage_source))
    # Another model's vocabulary is refused before anything is allocated.
    words = load_vocabulary(vocabulary or sources[0], rows=model.transformer.vocab_size)
    facts: dict[str, object] = {
        "pretrained": recorded_name(pretrained.source),
        "pretrained_fingerprints": list(map(weights_digest, sources)),
        "query_length": feature_lengths["query"],
        "passage_length": feature_lengths["passage"],
    }
    # How a sentence-transformers model, or that of each role, takes texts.
    (query, _), (_, passage) = (read_prompts(sources[place], words) for place in (0, -1))
    prompts = {"query_prompt": query, "passage_prompt": passage}
    facts |= {name: list(ids) for name, ids in prompts.items() if ids}
    facts |= text_facts(sources[0])
    module = DualEncoder(model)
    if _is_here(directory, model, facts, config_text):
        logger.info("%s: the same import is here already", model_dir)
        return parameter_count(abstract_params(module))
    check_empty(directory)
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.local_devices()[:1]))
    # A failed import leaves nothing.
    with replacing(directory) as place:
        scratch = pathlib.Path(place)
        words.save(str(scratch / VOCABULARY))
        loaded = read_pretrained(
            pretrained,
            config=model,
            params=abstract_params(module),
            vocabulary=scratch / VOCABULARY,
        )
        draw = drawn_without(loaded, functools.partial(init_params, module))
        params = place_pretrained(loaded, params=jax.jit(draw)(named_key(seed, "init")))
        write_model(
            scratch, module, params, facts=facts, partitioner=partitioner, config_text=config_text
        )
    logger.info("%s: %s parameters in %s", pretrained.source, parameter_count(params), model_dir)
    return parameter_count(params)


def _is_here(
    directory: pathlib.Path, model: ModelConfig, facts: Mapping[str, object], config_text: str
) -> bool:
    """Whether this very import is there: a kill may come after it and before it is reported."""
    if not (directory / MODEL_FILE).is_file() or read_model_config(directory) != model:
        return False
    return facts.items() <= read_facts(directory).items() and config_text == read_config_text(
        directory
    )


@writes("{output_dir}", kinds=[])
def import_embeddings(*, source: str, output_dir: str, data_dir: str, collection: str) -> int:
    """Makes a directory of embeddings from Parquet; `taser search` then needs no model.

    Args:
        source: directory of the Parquet files, as `taser export embeddings` writes it; others'
            needs the columns `id` and `embedding` alone.
        output_dir: gets what `taser encode` writes; must hold no embeddings.
        data_dir: folder of collections.
        collection: the collection, whose ids the files name.

    Returns:
        Number of passages.

    Raises:
        ConfigError: the directory has embeddings already.
        DataError: files that do not fit the collection.
    """
    store = PassageStore.open(data_dir, collection)
    with phase("import embeddings"):
        embedding_files.import_embeddings(
            pathlib.Path(source), pathlib.Path(output_dir), store=store
        )
    logger.info("%s: %d passages in %s", source, len(store), output_dir)
    return len(store)
