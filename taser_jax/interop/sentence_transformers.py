"""Directories that sentence-transformers and transformers load, written without either.

Two paths (DPR, TASER) become a sentence-transformers Router of two directories, each of which can
also be loaded as a model; one path (tied encoders without experts) becomes one model:

    modules.json, router_config.json   modules.json, 1_Pooling/, config.json, model.safetensors, ...
    query/                             (the same files)
    passage/
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors.numpy import save_file

from taser_jax.interop.bert import bert_leaves, plain_encoder
from taser_jax.interop.bert_formats import FORMATS, config_to_json
from taser_jax.interop.export_source import PASSAGE_INPUTS, CardTexts, ExportSource, prompt_text
from taser_jax.interop.hub import write_json
from taser_jax.interop.t5 import t5_leaves, t5_to_json
from taser_jax.interop.tensors import SAFETENSORS, Tensors, params_to_tensors
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import ModelConfig, Towers
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError

_FORMAT = "sentence_transformers"
_LIBRARY = "sentence_transformers.models"
_DENSE = "2_Dense"
# A module of our own, whose file travels with the model.
_DECODER = "first_decoder_output.FirstDecoderOutput"
_DECODER_FILE = f"{_DECODER.partition('.')[0]}.py"
# sentence-transformers' name of a route -> the role's directory.
_ROUTES = {"query": Role.QUERY, "document": Role.PASSAGE}
_QUERY = "query"

PlainConfig = DualEncoderConfig | T5DualEncoderConfig
# Directory of a module -> its type, and its config.json.
Modules = dict[str, tuple[str, Mapping[str, object]]]


def plain_paths(config: ModelConfig, *, prompt: Sequence[int] = ()) -> Mapping[str, Role]:
    """Sub-directory -> role, for every plain encoder that a dual encoder is made of.

    If the tokenizer adds a prompt to one role's texts, each role needs a tokenizer of its own.

    Example:
        >>> plain_paths(DualEncoderConfig(towers=Towers.SEPARATE))
        {'query': <Role.QUERY: 'query'>, 'passage': <Role.PASSAGE: 'passage'>}
        >>> plain_paths(DualEncoderConfig())
        {'': <Role.PASSAGE: 'passage'>}
    """
    has_experts = isinstance(config, DualEncoderConfig) and config.experts.num_experts > 1
    if config.towers is Towers.TIED and not has_experts and not prompt:
        return {"": Role.PASSAGE}
    return {role.value: role for role in Role}


def check(config: ModelConfig, *, format: str = _FORMAT) -> None:
    """Refuses, before anything is computed, models that a format of plain encoders cannot have.

    Args:
        config: the dual encoder.
        format: the requested format: this one, which has T5's too, or another of plain BERTs.

    Raises:
        ConfigError: another architecture, learned routing, or heads that BertModel cannot have.
    """
    where = "export_model.formats"
    if isinstance(config, T5DualEncoderConfig) and format == _FORMAT:
        return
    if not isinstance(config, DualEncoderConfig):
        name = type(config).__name__.removesuffix("DualEncoderConfig")
        problem = f"{format!r} is a format of BERTs, and this model is a {name}"
        raise ConfigError(problem, where=where, fix="export it as saved_model or stablehlo")
    if config.experts.learned:
        raise ConfigError(
            f"format {format!r} has plain BERTs, and with {config.experts.routing.value!r} routing "
            "the expert depends on the text",
            where=where,
            fix="export it as saved_model or stablehlo, which include the router",
        )
    config_to_json(config.bert)


def export_sentence_transformers(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes a directory for `SentenceTransformer(output_dir)`.

    Its `encode_query` and `encode_document` give this model's embeddings. The prompt of queries is
    in `prompts`; if no text yields it because it has special tokens, the tokenizer of queries adds
    it. If the roles have separate encoders or tokenizers,
    `output_dir`/query and `output_dir`/passage can also be loaded separately, also with
    transformers' AutoModel and AutoTokenizer.

    Args:
        source: what to export.
        output_dir: an empty directory.

    Raises:
        ConfigError: a vocabulary that such an encoder does not have.
        DataError: the vocabulary is missing.
    """
    config, paths = _paths(source)
    for name, role in paths.items():
        write_model(source, role, output_dir / name, serves_both=len(paths) == 1)
    if len(paths) > 1:
        _write_router(source, config, output_dir)
    if _decodes(config):
        # Beside every modules.json, where it is looked for.
        for modules in list(output_dir.rglob("modules.json")):
            shutil.copyfile(
                pathlib.Path(__file__).with_name(_DECODER_FILE), modules.with_name(_DECODER_FILE)
            )


def _paths(source: ExportSource) -> tuple[PlainConfig, Mapping[str, Role]]:
    config = source.config
    assert isinstance(config, PlainConfig)
    return config, plain_paths(config, prompt=_ids_before_queries(source) or source.passage_prompt)


def _ids_before_queries(source: ExportSource) -> tuple[int, ...]:
    """The prompt's ids if no text yields them, so that the tokenizer must add them; else none."""
    ids = source.query_settings.prompt
    return ids if prompt_text(ids, source.vocabulary) is None else ()


def card_texts(source: ExportSource) -> CardTexts:
    """This format's texts for the model card."""
    config, paths = _paths(source)
    form, example = PASSAGE_INPUTS[source.titles]
    contents = (
        f"For [sentence-transformers](https://sbert.net) 6. A passage is {form}. `encode_query` "
        "and `encode_document` truncate each to its length.\n"
    )
    if source.query_settings.prompt:
        contents += "\n`encode_query` puts the prompt before each query.\n"
    if len(paths) > 1:
        contents += (
            "\n`query/` and `passage/` are also separate models, plain encoders that "
            "`SentenceTransformer` and transformers' `AutoModel` can load.\n"
        )
    trusted = ""
    if _decodes(config):
        contents += (
            f"\nThe embedding is the decoder's output. `{_DECODER_FILE}` computes it, and "
            "`trust_remote_code=True` lets sentence-transformers run that file.\n"
        )
        trusted = ", trust_remote_code=True"
    code = f"""
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("."{trusted})
queries = ["on which river lies Paris"]
passages = [{example}, "A passage without a title."]
query_embeddings = model.encode_query(queries)
passage_embeddings = model.encode_document(passages)
scores = model.similarity(query_embeddings, passage_embeddings)  # dot products
"""
    tags = ("sentence-transformers", "transformers", "feature-extraction")
    return CardTexts(_FORMAT, contents, code, tags, library="sentence-transformers")


def write_model(
    source: ExportSource, role: Role, directory: pathlib.Path, *, serves_both: bool
) -> None:
    """Writes a sentence-transformers model: encoder, pooling, projection and normalisation.

    Args:
        source: what to export, made of plain encoders.
        role: the role of its texts.
        directory: where to write.
        serves_both: whether the model encodes the other role's texts, too.
    """
    config = source.config
    assert isinstance(config, PlainConfig)
    modules = _modules(config)
    for name, (_, content) in modules.items():
        (directory / name).mkdir(exist_ok=True)
        write_json(directory / name / "config.json", content)
    length = source.length(role)
    settings: dict[str, object] = {"max_seq_length": length, "do_lower_case": False}
    if isinstance(config, T5DualEncoderConfig):
        params, leaves = source.params[config.tower_name(role, source.task)], t5_leaves(_t5(config))
        if _DENSE in modules:
            kernel = np.asarray(params["projection_layer"]["kernel"], np.float32)
            tensors = {"linear.weight": np.ascontiguousarray(kernel.T)}
            _write_tensors(directory / _DENSE / SAFETENSORS, tensors)
    else:
        params = plain_encoder(source.params, config, role, task=source.task)
        leaves = bert_leaves(config.bert)
        if FORMATS[config.bert.family].has_pooler:
            settings["model_args"] = {"add_pooling_layer": False}
    _write_tensors(directory / SAFETENSORS, params_to_tensors(params, leaves))
    prompt = _ids_before_queries(source) if role is Role.QUERY else source.passage_prompt
    write_tokenizer(source.vocabulary_dir, directory, max_length=length, prompt=prompt)
    if serves_both:
        settings["query_length"] = source.query_length
        settings["document_length"] = source.passage_length
    write_json(directory / "sentence_bert_config.json", settings)
    by_itself = _QUERY if role is Role.QUERY and not serves_both else None
    _write_modules(source, modules, directory, default=by_itself)


def _decodes(config: PlainConfig) -> bool:
    """Whether an embedding is a decoder's output."""
    mean = T5Embedding.ENCODER_MEAN
    return isinstance(config, T5DualEncoderConfig) and config.embedding is not mean


def _t5(config: T5DualEncoderConfig) -> T5Config:
    """What Hugging Face's T5Model or T5EncoderModel has of the T5."""
    return config.t5 if _decodes(config) else dataclasses.replace(config.t5, num_decoder_layers=0)


def _modules(config: PlainConfig) -> Modules:
    """Those of encoder, pooling, projection and normalisation."""
    pooling, projection_dim = Pooling.MEAN, None
    if isinstance(config, T5DualEncoderConfig):
        encoder, projection_dim = t5_to_json(_t5(config)), config.projection_dim
    else:
        encoder, pooling = config_to_json(config.bert), config.pooling
    modules: Modules = {"": (f"{_LIBRARY}.Transformer", encoder)}
    if _decodes(config):
        modules["1_FirstDecoderOutput"] = (_DECODER, encoder)
    else:
        pools = {
            "embedding_dimension": config.transformer.embed_dim,
            "pooling_mode": pooling.value,
            "include_prompt": True,
        }
        modules["1_Pooling"] = (f"{_LIBRARY}.Pooling", pools)
    if projection_dim is not None:
        dense = {
            "in_features": config.transformer.embed_dim,
            "out_features": projection_dim,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        modules[_DENSE] = (f"{_LIBRARY}.Dense", dense)
    if config.normalization is Normalization.L2:
        modules["2_Normalize"] = (f"{_LIBRARY}.Normalize", {})
    return modules


def _write_router(source: ExportSource, config: PlainConfig, directory: pathlib.Path) -> None:
    """Routes queries and documents to the roles' directories, without copying them."""
    structure = {
        route: {
            f"{role.value}/{name}".rstrip("/"): kind for name, (kind, _) in _modules(config).items()
        }
        for route, role in _ROUTES.items()
    }
    write_json(
        directory / "router_config.json",
        {
            "types": structure["query"] | structure["document"],
            "structure": {route: list(modules) for route, modules in structure.items()},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )
    _write_modules(source, {"": (f"{_LIBRARY}.Router", {})}, directory)


def _write_modules(
    source: ExportSource, modules: Modules, directory: pathlib.Path, *, default: str | None = None
) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, (kind, _)) in enumerate(modules.items())
    ]
    write_json(directory / "modules.json", listed)
    # Empty if the tokenizer adds the prompt.
    text = prompt_text(source.query_settings.prompt, source.vocabulary) or ""
    settings = {
        "model_type": "SentenceTransformer",
        "prompts": {_QUERY: text, "document": ""},
        "default_prompt_name": default,
        "similarity_fn_name": "dot",
    }
    write_json(directory / "config_sentence_transformers.json", settings)


def _write_tensors(path: pathlib.Path, tensors: Tensors) -> None:
    # transformers refuses files that do not name a framework.
    save_file(tensors, path, metadata={"format": "pt"})
