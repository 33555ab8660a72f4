"""`taser export`: models and embeddings in the formats of others; `taser push` to the hub."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pathlib
import types
from collections.abc import Sequence

import jax

from taser_jax.assembly.model_directory import (
    RUN_FILE,
    VOCABULARY,
    load_model,
    read_config_text,
    read_facts,
    read_model_config,
)
from taser_jax.assembly.run_record import TextSettings, text_settings
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.results import read_results
from taser_jax.interop.export_source import CARD, ExportSource, check_exported, metadata, write_card
from taser_jax.interop.hub import EXPORT_FILE, first_line
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval import embedding_files
from taser_jax.retrieval.embeddings import (
    Codes,
    Coding,
    Embeddings,
    QueryEmbeddings,
    encoded_splits,
)
from taser_jax.storage import checksums
from taser_jax.storage.artifacts import check_empty, read_json, replacing
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.progress import logger, phase

# Seconds that a hub has for each answer to `taser push`.
_ANSWER_SECONDS = 120.0


# Modules of `interop` that write a model.
MODEL_FORMATS = ("sentence_transformers", "saved_model", "stablehlo", "onnx")


@dataclasses.dataclass(frozen=True)
class EmbeddingsExport:
    """Embeddings to export, and the collection that they are of.

    Attributes:
        embeddings_dir: from `taser encode`; the queries' embeddings are exported too.
        data_dir: folder of collections, for ids, titles and texts.
        collection: the collection.
        codes: how Parquet holds the passages' numbers; the recall that int8 and binary cost is
            measured on the encoded queries, printed and recorded.
    """

    embeddings_dir: str | None = None
    data_dir: str | None = None
    collection: str | None = None
    codes: Codes = Codes.FLOAT32


@writes("{output_dir}")
def export_model(
    *,
    model_dir: str | None,
    output_dir: str,
    formats: Sequence[str] = ("sentence_transformers",),
    embeddings: EmbeddingsExport = EmbeddingsExport(),
    step: int | None = None,
    query_length: int | None = None,
    passage_length: int | None = None,
    results_dir: str | None = None,
    system: str | None = None,
    task: str | None = None,
    license: str | None = None,
) -> dict[str, pathlib.Path]:
    """Writes a trained model in other formats, each with a model card and export.json.

    With the formats of vector stores, writes embeddings instead, each with a metadata.json. Each
    format is written to the sub-directory of `output_dir` with its name. All are checked before
    anything is computed, and none is left half-written.

    Args:
        model_dir: the trained model; for embeddings that of their queries, or None.
        output_dir: parent of the formats' directories. Each must be absent or empty, or hold this
            very export, which is then kept.
        formats: some of "sentence_transformers", "saved_model", "stablehlo" and "onnx"; or, for
            embeddings, of "embeddings" (Parquet), "faiss" and "vertex".
        embeddings: what the formats of embeddings hold.
        step: step of the checkpoint; None means the best one.
        query_length: maximum tokens per query; None means as in training.
        passage_length: maximum tokens per passage; None means as in training.
        results_dir: EVAL_OUTPUT_DIR of `taser evaluate`, for the metrics in the model card.
        system: system in these results; needed if there are several.
        task: task of the encoder, if encoders differ by task.
        license: of the weights, such as "apache-2.0", for the model card; None names none.

    Returns:
        Format -> its directory.

    Raises:
        ConfigError: an unknown format, one that cannot hold this model or whose packages are not
            installed, a directory that is not empty, or unknown lengths.
        DataError: the vocabulary is missing.
        FingerprintError: embeddings of another model or collection.
    """
    chosen = _formats(formats)
    if chosen[0] in embedding_files.FORMATS:
        return export_stores(chosen, embeddings, model_dir, pathlib.Path(output_dir), step=step)
    directories = {format: pathlib.Path(output_dir) / format for format in chosen}
    if model_dir is None:
        raise ConfigError("no model", where="MODEL_DIR", fix="--gin.MODEL_DIR=...")
    for directory in directories.values():
        if not (directory / EXPORT_FILE).is_file():
            check_empty(directory)
    config = read_model_config(model_dir)
    facts = read_facts(model_dir)
    check_exported(config, task)
    exporters = {format: _exporter(format, config) for format in chosen}
    load_vocabulary(pathlib.Path(model_dir) / VOCABULARY, rows=config.transformer.vocab_size)
    texts = text_settings(facts, task)
    query_length = _length("query_length", query_length, texts, config, model_dir)
    passage_length = _length("passage_length", passage_length, texts, config, model_dir)
    measured = _metrics(results_dir, system)
    with phase("read the model"):
        model = load_model(model_dir, step=step)
        source = ExportSource(
            config=config,
            params=jax.device_get(model.params),
            vocabulary_dir=model.vocabulary_dir,
            query_length=query_length,
            passage_length=passage_length,
            fingerprint=model.fingerprint,
            facts={**facts, "checkpoint_step": model.step},
            metrics=measured,
            config_text=read_config_text(model_dir),
            task=task,
            query_settings=texts.queries,
            titles=texts.titles,
            passage_prompt=texts.passage_prompt,
            license=license,
        )
    done = {format for format, path in directories.items() if _is_there(source, format, path)}
    for format, directory in directories.items():
        if format in done:
            logger.info("%s: %s, the same export is here already", format, directory)
            continue
        with phase(f"export {format}"), replacing(directory) as scratch:
            scratch.mkdir()
            exporter = exporters[format]
            getattr(exporter, f"export_{format}")(source, pathlib.Path(scratch))
            write_card(source, pathlib.Path(scratch), exporter.card_texts(source))
            checksums.seal(scratch)
        logger.info("%s: %s", format, directory)
    return directories


def _exporter(format: str, config: ModelConfig) -> types.ModuleType:
    """A format's module, imported on demand, since each needs other packages.

    Raises:
        ConfigError: the format cannot hold the model, or its packages are absent.
    """
    try:
        module = importlib.import_module(f"taser_jax.interop.{format}")
    except ImportError as error:
        problem, fix = f"TensorFlow is not installed ({error})", how_to_install("tensorflow")
        raise ConfigError(problem, where=f"format {format!r}", fix=fix) from error
    if hasattr(module, "check"):
        module.check(config)
    return module


def _formats(formats: Sequence[str]) -> list[str]:
    """The formats, once each: of a model, or of vector stores."""
    names = (*MODEL_FORMATS, *embedding_files.FORMATS)
    chosen = list(dict.fromkeys(formats))
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        problem = f"{unknown[0]!r} is no format" if unknown else "no format is given"
        fix = f"choose of {', '.join(names)}, as in `taser export stablehlo`"
        raise ConfigError(problem, where="export_model.formats", fix=fix)
    if 0 < len({*chosen} & {*embedding_files.FORMATS}) < len(chosen):
        fix = "two commands: `taser export sentence_transformers`, then `taser export embeddings`"
        raise ConfigError("formats of a model and of embeddings", where="taser export", fix=fix)
    return chosen


def _is_there(source: ExportSource, format: str, directory: pathlib.Path) -> bool:
    """Whether this very export is there already.

    Raises:
        ConfigError: the directory holds anything else.
    """
    written = read_json(directory / EXPORT_FILE, absent={})
    if written and written != json.loads(json.dumps(metadata(source, format))):
        check_empty(directory)
    return bool(written)


def _length(
    name: str, given: int | None, texts: TextSettings, config: ModelConfig, model_dir: str
) -> int:
    """A given or recorded length that the model takes."""
    length = getattr(texts, name) if given is None else given
    limit, set_it = config.max_length, f"--gin.export_model.{name}=..."
    if length is None:
        where = f"{pathlib.Path(model_dir) / RUN_FILE}, field {name!r}"
        fix = f"{set_it}, as in the token store it was trained from"
        raise ConfigError(f"{name} is not known", where=where, fix=fix)
    if not 4 <= length <= (limit or length):
        room = "4 or more" if limit is None else f"4 to {limit}, the rows of the position table"
        problem = f"{name} is {length}, not {room}"
        raise ConfigError(problem, where="taser export", fix=f"{set_it}, as in training")
    return length


def _metrics(results_dir: str | None, system: str | None) -> dict[str, float]:
    """`task measure` -> value, of one system."""
    if results_dir is None:
        return {}
    # `taser evaluate` puts them into a folder of its EVAL_OUTPUT_DIR.
    directory = pathlib.Path(results_dir) / "results"
    results = read_results(directory, None if system is None else [system])
    if len(results) > 1:
        names = ", ".join(repr(result.system) for result in results)
        problem = f"results of {len(results)} systems, {names}"
        raise ConfigError(problem, where=results_dir, fix="--gin.export_model.system=...")
    return {
        f"{task} {measure}": value
        for task, result in results[0].tasks.items()
        for measure, value in result.metrics.items()
    }


def push(*, repo: str, export_dir: str, private: bool = True) -> str:
    """Uploads a directory of `taser export` to the Hugging Face hub, in one commit.

    The card's front matter has what the hub reads: licence, library, base model, tags and, with
    `export_model.results_dir`, the measures as `model-index`. The token is that of `hf auth login`
    or `HF_TOKEN`; `HF_ENDPOINT` names another hub.

    Args:
        repo: "owner/name"; made if there is none.
        export_dir: directory of one format.
        private: whether a repository that is made here is private.

    Returns:
        URL of the commit.

    Raises:
        ConfigError: no export there.
        DataError: the hub cannot be reached, or refuses.
    """
    import huggingface_hub

    directory = pathlib.Path(export_dir)
    if not (directory / EXPORT_FILE).is_file() or not (directory / CARD).is_file():
        fix = "`taser export sentence_transformers` writes one, into a folder of that name"
        raise ConfigError("no exported model", where=export_dir, fix=fix)
    api = huggingface_hub.HfApi()
    # The library itself waits for ever.
    huggingface_hub.get_session().timeout = _ANSWER_SECONDS
    with phase(f"push {repo}"):
        try:
            repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
            message = "Model exported by taser_jax"
            commit = api.upload_folder(repo_id=repo, folder_path=directory, commit_message=message)
        except Exception as error:
            # Offline, name resolution, proxy, HTTP and log-in errors share no base class.
            told = getattr(error, "server_message", None) or str(error)
            reason = first_line(told) or type(error).__name__
            fix = "check the name, the network and the token (`hf auth login`, or HF_TOKEN)"
            raise DataError(f"the hub did not take it: {reason}", where=repo, fix=fix) from error
    logger.info("%s: %s", export_dir, commit.commit_url)
    return str(commit.commit_url)


def export_stores(
    formats: Sequence[str],
    source: EmbeddingsExport,
    model_dir: str | None,
    output_dir: pathlib.Path,
    *,
    step: int | None,
) -> dict[str, pathlib.Path]:
    """Writes embeddings, and those of queries, in formats of vector stores.

    Args:
        formats: some of `embedding_files.FORMATS`.
        source: embeddings and collection.
        model_dir: the model that encoded them; None leaves it unchecked.
        output_dir: parent of the formats' directories.
        step: step of the model's checkpoint; None means the best one.

    Returns:
        Format -> its directory.

    Raises:
        ConfigError: no embeddings or no collection are named, codes in another format than
            Parquet, or FAISS is not installed.
        FingerprintError: the embeddings are of another model or collection.
    """
    if source.embeddings_dir is None or source.data_dir is None or source.collection is None:
        problem = "embeddings are exported with their ids and texts, and these are not all given"
        fix = "--gin.EMBEDDINGS_DIR=... --gin.DATA_DIR=... --gin.COLLECTION=..."
        raise ConfigError(problem, where="taser export", fix=fix)
    if source.codes is not Codes.FLOAT32 and list(formats) != [embedding_files.PARQUET]:
        problem, fix = f"{source.codes.value} codes are for Parquet", "taser export embeddings"
        raise ConfigError(problem, where="EmbeddingsExport.codes", fix=fix)
    if embedding_files.FAISS in formats and importlib.util.find_spec("faiss") is None:
        fix = how_to_install("faiss")
        raise ConfigError("FAISS is not installed", where="format 'faiss'", fix=fix)
    store = PassageStore.open(source.data_dir, source.collection)
    expected = {"collection": store.fingerprint}
    if model_dir is not None:
        expected["model"] = load_model(model_dir, step=step).fingerprint
    embeddings = Embeddings(source.embeddings_dir, fingerprints=expected)
    prints = embeddings.fingerprints
    queries = [
        (
            QueryEmbeddings.of_split(source.embeddings_dir, task, split, fingerprints=prints),
            store.queries(task, split),
        )
        for task, split in encoded_splits(source.embeddings_dir)
    ]
    coding = Coding.of(source.codes, embeddings)
    facts = _query_encoders(output_dir, prints.get("model"))
    directories = {format: output_dir / format for format in formats}
    for format, directory in directories.items():
        with phase(f"export {format}"):
            embedding_files.export_embeddings(
                embeddings,
                store,
                directory,
                format=format,
                coding=coding,
                queries=queries if format == embedding_files.PARQUET else (),
                facts=facts,
            )
        logger.info("%s: %s", format, directory)
    return directories


def _query_encoders(output_dir: pathlib.Path, fingerprint: str | None) -> dict[str, object]:
    """The exports of the embeddings' model that lie beside them, and its queries' prompts."""
    encoders, prompts = {}, None
    for path in sorted(output_dir.glob(f"*/{EXPORT_FILE}")):
        facts = read_json(path)
        if fingerprint is None or facts["fingerprints"].get("model") != fingerprint:
            continue
        encoders[facts["format"]] = f"../{path.parent.name}"
        settings = path.parent / "config_sentence_transformers.json"
        prompts = read_json(settings, absent={}).get("prompts") or prompts
    return {"query_encoders": encoders, "prompts": prompts}
