"""Directories that sentence-transformers and transformers load, written without either.

Two paths (DPR, TASER) become a sentence-transformers Router of two directories, each of which can
also be loaded as a model; one path (tied encoders without experts) becomes one model:

    modules.json, router_config.json   modules.json, 1_Pooling/, config.json, model.safetensors, ...
    query/                             (the same files)
    passage/
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from safetensors.numpy import save_file

from taser_jax.interop.bert import config_to_json, encoder_to_tensors
from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.model_card import CardTexts, left_to_the_reader
from taser_jax.interop.plain import plain_encoder
from taser_jax.interop.prompts import DOCUMENT, QUERY, ids_before_queries, prompt_texts
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import ModelConfig, Towers
from taser_jax.models.encoded import Normalization
from taser_jax.storage.errors import ConfigError

WEIGHTS = "model.safetensors"
_FORMAT = "sentence_transformers"
_TRANSFORMER = "sentence_transformers.models.Transformer"
_POOLING = "sentence_transformers.models.Pooling"
_ROUTER = "sentence_transformers.models.Router"
_NORMALIZE = "sentence_transformers.models.Normalize"
_POOLING_DIR, _NORMALIZE_DIR = "1_Pooling", "2_Normalize"
# sentence-transformers' name of a route -> the role's directory.
_ROUTES = {"query": Role.QUERY, "document": Role.PASSAGE}


def plain_paths(config: DualEncoderConfig, *, prompt: Sequence[int] = ()) -> Mapping[str, Role]:
    """Sub-directory -> role, for every plain BERT that a dual encoder is made of.

    If the tokenizer adds a prompt to queries, they need a tokenizer of their own.

    Example:
        >>> plain_paths(DualEncoderConfig(towers=Towers.SEPARATE))
        {'query': <Role.QUERY: 'query'>, 'passage': <Role.PASSAGE: 'passage'>}
        >>> plain_paths(DualEncoderConfig())
        {'': <Role.PASSAGE: 'passage'>}
    """
    if config.towers is Towers.TIED and config.experts.num_experts == 1 and not prompt:
        return {"": Role.PASSAGE}
    return {role.value: role for role in Role}


def check_plain(config: ModelConfig, *, format: str) -> DualEncoderConfig:
    """Refuses, before anything is computed, models that are not plain BERTs.

    Args:
        config: the dual encoder.
        format: the requested format, for the message.

    Returns:
        The same configuration: a BERT's.

    Raises:
        ConfigError: another architecture, learned routing, or heads that BertModel cannot have.
    """
    if config.kind != DualEncoderConfig.kind:
        raise ConfigError(
            f"format {format!r} of a {type(config).__name__.removesuffix('DualEncoderConfig')}",
            where="export_model.formats",
            expected="a BERT: this format supports nothing else",
            fix="export it as saved_model or stablehlo",
        )
    bert = cast(DualEncoderConfig, config)
    if bert.experts.learned:
        raise ConfigError(
            f"format {format!r} of a model with {bert.experts.routing.value!r} routing",
            where="export_model.formats",
            expected="deterministic routing, or no experts: this format has plain BERTs, and with "
            "learned routing the expert depends on the text",
            fix="export it as saved_model or stablehlo, which include the router",
        )
    config_to_json(bert.bert)
    return bert


def export_sentence_transformers(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes a directory for `SentenceTransformer(output_dir)`.

    Its `encode_query` and `encode_document` give this model's embeddings. The prompt of queries is
    in `prompts`, under "query" and the names of tasks; if no text yields it because it has special
    tokens, the tokenizer of queries adds it. If the roles have separate encoders or tokenizers,
    `output_dir`/query and `output_dir`/passage can also be loaded separately, also with
    transformers' AutoModel and AutoTokenizer.

    Args:
        source: what to export.
        output_dir: an empty directory.

    Raises:
        ConfigError: learned routing, or heads that BertModel cannot have.
        DataError: the vocabulary is missing or not a WordPiece vocabulary.
    """
    config = check_plain(source.config, format=_FORMAT)
    paths = plain_paths(config, prompt=ids_before_queries(source))
    for name, role in paths.items():
        _write_model(source, config, role, output_dir / name, serves_both=len(paths) == 1)
    if len(paths) > 1:
        _write_router(config, output_dir, _prompts(source))


def length_of(source: ExportSource, role: Role) -> int:
    """Maximum number of tokens of a role's texts."""
    return source.query_length if role is Role.QUERY else source.passage_length


def card_texts(source: ExportSource) -> CardTexts:
    """This format's texts for the model card."""
    config = check_plain(source.config, format=_FORMAT)
    paths = plain_paths(config, prompt=ids_before_queries(source))
    contents = (
        "For [sentence-transformers](https://sbert.net) 6. A passage is a pair `(title, text)`, or "
        "`text` alone where it has no title, which is not a pair with an empty one. `encode_query` "
        "and `encode_document` truncate each to its length.\n"
    )
    contents += _about_prompts(source) + left_to_the_reader(source)
    tokens = f"tokenizer(*passages[0], truncation=True, max_length={source.passage_length}"
    if len(paths) > 1:
        contents += (
            "\n`query/` and `passage/` are also separate models, plain BERTs that "
            "`SentenceTransformer` and transformers' `AutoModel` can load.\n"
        )
    directory = "passage" if len(paths) > 1 else "."
    embedding = "hidden[:, 0]" if config.pooling is Pooling.CLS else "hidden.mean(1)"
    if config.normalization is Normalization.L2:
        embedding = f"normalize({embedding})"
    imports = "from torch.nn.functional import normalize\n" if "normalize" in embedding else ""
    code = f"""
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")
queries = ["on which river lies Paris"]
passages = [("Paris", "Paris lies on the Seine."), "A passage without a title."]
query_embeddings = model.encode_query(queries)
passage_embeddings = model.encode_document(passages)
scores = model.similarity(query_embeddings, passage_embeddings)  # dot products

# The same with transformers alone.
{imports}from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{directory}")
encoder = AutoModel.from_pretrained("{directory}", add_pooling_layer=False)
tokens = {tokens}, return_tensors="pt")
hidden = encoder(**tokens).last_hidden_state
first_passage_embedding = {embedding}
"""
    tags = ("sentence-transformers", "transformers", "feature-extraction")
    return CardTexts(_FORMAT, contents, code, tags)


def _write_model(
    source: ExportSource,
    config: DualEncoderConfig,
    role: Role,
    directory: pathlib.Path,
    *,
    serves_both: bool,
) -> None:
    """Writes a sentence-transformers model: BERT, pooling, and normalisation if configured."""
    directory.mkdir(exist_ok=True)
    params = plain_encoder(source.params, config, role, task=source.task)
    tensors = encoder_to_tensors(params, config.bert)
    _write_json(directory / "config.json", config_to_json(config.bert))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_tokenizer(
        source.vocabulary_dir,
        directory,
        max_length=length_of(source, role),
        rows=config.bert.vocab_size,
        prompt=ids_before_queries(source) if role is Role.QUERY else (),
    )
    settings: dict[str, Any] = {
        "max_seq_length": length_of(source, role),
        "do_lower_case": False,
        # BertModel would add an unused pooler.
        "model_args": {"add_pooling_layer": False},
    }
    if serves_both:
        settings["query_length"] = source.query_length
        settings["document_length"] = source.passage_length
    _write_json(directory / "sentence_bert_config.json", settings)
    for name in _modules(config):
        (directory / name).mkdir(exist_ok=True)
    _write_json(
        directory / _POOLING_DIR / "config.json",
        {
            "embedding_dimension": config.bert.embed_dim,
            "pooling_mode": config.pooling.value,
            "include_prompt": True,
        },
    )
    if _NORMALIZE_DIR in _modules(config):
        _write_json(directory / _NORMALIZE_DIR / "config.json", {})
    by_itself = QUERY if role is Role.QUERY and not serves_both else None
    _write_modules(directory, _modules(config), _prompts(source), default=by_itself)


def _prompts(source: ExportSource) -> dict[str, str]:
    """Name -> text before a query; the texts are empty if the tokenizer adds the prompt."""
    names = dict.fromkeys((*([source.task] if source.task else ()), QUERY, DOCUMENT), "")
    found = prompt_texts(source)
    return names if found is None else found


def _about_prompts(source: ExportSource) -> str:
    if not any(source.prompts.values()) and not source.query_settings.prompt:
        return ""
    if ids_before_queries(source):
        return "\nThe tokenizer of queries puts the prompt before each: `encode_query(queries)`.\n"
    names = ", ".join(f'`"{name}"`' for name in _prompts(source) if name != DOCUMENT)
    return (
        "\n`encode_query` puts this model's prompt before each query; "
        f"`encode_query(queries, prompt_name=...)` takes {names}.\n"
    )


def _modules(config: DualEncoderConfig) -> dict[str, str]:
    """Directory -> type, in order."""
    modules = {"": _TRANSFORMER, _POOLING_DIR: _POOLING}
    if config.normalization is Normalization.L2:
        modules[_NORMALIZE_DIR] = _NORMALIZE
    return modules


def _write_router(
    config: DualEncoderConfig, directory: pathlib.Path, prompts: Mapping[str, str]
) -> None:
    """Routes queries and documents to the roles' directories, without copying them."""
    structure = {
        route: {f"{role.value}/{name}".rstrip("/"): kind for name, kind in _modules(config).items()}
        for route, role in _ROUTES.items()
    }
    _write_json(
        directory / "router_config.json",
        {
            "types": {
                name: kind for modules in structure.values() for name, kind in modules.items()
            },
            "structure": {route: list(modules) for route, modules in structure.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )
    _write_modules(directory, {"": _ROUTER}, prompts)


def _write_modules(
    directory: pathlib.Path,
    modules: Mapping[str, str],
    prompts: Mapping[str, str],
    *,
    default: str | None = None,
) -> None:
    _write_json(
        directory / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": kind}
            for i, (path, kind) in enumerate(modules.items())
        ],
    )
    _write_json(
        directory / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": prompts,
            "default_prompt_name": default,
            "similarity_fn_name": "dot",
        },
    )


def _write_json(path: pathlib.Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
