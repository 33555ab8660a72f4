"""The input of every exporter, a trained dual encoder with its prompts, and its model card.

The prompts of queries leave as texts if a text yields their ids, else as ids. The card of an export
is README.md for people and export.json for programs:

{"format_version": 1, "format": "sentence_transformers", "taser_jax": "0.1.0",
 "fingerprints": {"model": "0f3a...", "vocabulary": "77b1...", "data": "..."},
 "query_length": 32, "passage_length": 128, "pooling": "cls", "score": "dot", ...}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

from huggingface_hub import EvalResult, ModelCardData

import taser_jax
from taser_jax.data.text.vocabularies import Vocabulary, load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.interop.hub import EXPORT_FILE, write_json
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.models.parameters import config_to_json, parameter_count
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import plain

FORMAT_VERSION = 1
CARD = "README.md"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# How a tokenizer is given a passage: in words, and an example.
PASSAGE_INPUTS = {
    Titles.INCLUDE: (
        "a pair `(title, text)`, or `text` alone where it has no title, which is not a pair with "
        "an empty one",
        '("Paris", "Paris lies on the Seine.")',
    ),
    Titles.JOIN: (
        "one text, `title text`, or `text` alone where it has no title",
        '"Paris Paris lies on the Seine."',
    ),
    Titles.OMIT: ("its text, without the title", '"Paris lies on the Seine."'),
}


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A trained dual encoder to export.

    Attributes:
        config: the dual encoder.
        params: its parameters, as arrays on this host.
        vocabulary_dir: the vocabulary it was trained with.
        query_length: tokens per query in training; longer queries were truncated.
        passage_length: tokens per passage, as for queries.
        fingerprint: fingerprint of configuration and parameters.
        facts: the record of its run (run.json): data fingerprints, steps, negatives per query.
        metrics: name -> value, for the model card; may be empty.
        config_text: the Gin configuration it was trained with.
        task: the task whose query encoder to export, if encoders differ by task.
        query_settings: how queries were converted to tokens.
        titles: whether passages were encoded with their titles.
        passage_prompt: ids put before every passage; tokenizers of exports add them.
        license: of the weights, for the model card; None names none.
    """

    config: ModelConfig
    params: Params
    vocabulary_dir: pathlib.Path
    query_length: int
    passage_length: int
    fingerprint: str
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    config_text: str = ""
    task: str | None = None
    query_settings: QuerySettings = QuerySettings()
    titles: Titles = Titles.INCLUDE
    passage_prompt: tuple[int, ...] = ()
    license: str | None = None

    def length(self, role: Role) -> int:
        """Maximum tokens of a role's texts."""
        return self.query_length if role is Role.QUERY else self.passage_length

    def prompt(self, role: Role) -> tuple[int, ...]:
        """Ids before every text of a role."""
        return self.query_settings.prompt if role is Role.QUERY else self.passage_prompt

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """What texts are tokenised with."""
        return load_vocabulary(self.vocabulary_dir)


def prompt_text(ids: Sequence[int], vocabulary: Vocabulary) -> str | None:
    """A text that yields these ids when put before another; None if there is none.

    Example:
        >>> vocabulary = WordPieceVocabulary(
        ...     ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "que", "##ry", ":"]
        ... )
        >>> prompt_text([4, 5, 6], vocabulary)
        'query : '
        >>> prompt_text([4, 5, 3], vocabulary) is None  # "[SEP]" in a text is ordinary text
        True

    Args:
        ids: the prompt's ids, without special tokens around it.
        vocabulary: the model's.
    """
    if not ids:
        return ""
    if not isinstance(vocabulary, WordPieceVocabulary):
        return None
    # The space at the end separates the prompt from the query's first word.
    text = " ".join(vocabulary.pieces[id] for id in ids).replace(" ##", "") + " "
    return text if vocabulary.encode([text]) == [list(ids)] else None


def check_exported(config: ModelConfig, task: str | None) -> None:
    """Refuses models that one program per role cannot stand for.

    Raises:
        ConfigError: queries with documents of a memory, or a missing or unknown task for a model
            with one query encoder per task.
    """
    if config.fuses:
        raise ConfigError(
            f"a {type(config).__name__.removesuffix('Config')} reads documents of a memory with "
            "each query, and an export has no memory",
            where="export_model.model_dir",
            fix="export a model that reads queries alone; `taser encode` and `taser search` serve "
            "this one",
        )
    config.tower_name(Role.QUERY, task)


@dataclasses.dataclass(frozen=True)
class CardTexts:
    """A format's texts for the model card.

    Attributes:
        format: its name in `taser export`.
        contents: description of the files and their inputs, in Markdown.
        code: Python that loads the export from the card's directory and encodes with it.
        tags: tags of the card's front matter, besides taser_jax's own.
        library: what loads it, by its name on the hub.
    """

    format: str
    contents: str
    code: str
    tags: tuple[str, ...] = ()
    library: str = "taser_jax"


def write_card(source: ExportSource, directory: pathlib.Path, texts: CardTexts) -> None:
    """Writes README.md and export.json beside an export.

    Args:
        source: the exported model.
        directory: directory of the export.
        texts: texts of its format.
    """
    (directory / CARD).write_text(card(source, texts), encoding="utf-8")
    write_json(directory / EXPORT_FILE, metadata(source, texts.format))


def metadata(source: ExportSource, format: str) -> dict[str, object]:
    """The content of export.json.

    Args:
        source: what was exported.
        format: its format.
    """
    fingerprints: dict[str, object] = {
        "model": source.fingerprint,
        "vocabulary": source.vocabulary.fingerprint,
    }
    for name in ("data", "collection"):
        if value := source.facts.get(f"{name}_fingerprint"):
            fingerprints[name] = value
    return {
        "format_version": FORMAT_VERSION,
        "format": format,
        "taser_jax": taser_jax.__version__,
        "fingerprints": fingerprints,
        "parameters": parameter_count(source.params),
        "embedding_dim": source.config.embedding_dim,
        "query_length": source.query_length,
        "passage_length": source.passage_length,
        "query_normalization": source.query_settings.normalization.value,
        "query_prompt": list(source.query_settings.prompt),
        "passage_prompt": list(source.passage_prompt),
        "titles": source.titles.value,
        "score": "dot",
        "task": source.task,
        "license": source.license,
        "metrics": dict(source.metrics),
        "training": {name: _without_folder(value) for name, value in source.facts.items()},
        "model": json.loads(config_to_json(source.config)),
    }


def card(source: ExportSource, texts: CardTexts) -> str:
    """The content of README.md.

    Args:
        source: what was exported.
        texts: texts of its format.
    """
    parts = [
        _front_matter(source, texts),
        f"# {source.config.describe().title}, a dense retriever\n",
        _summary(source),
        f"## How to load it\n\n{texts.contents.strip()}\n",
        f"In the directory of this file:\n\n```python\n{texts.code.strip()}\n```\n",
        _tables(source),
        _configuration(source),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(source: ExportSource, texts: CardTexts) -> str:
    """What the hub reads: licence, library, tags, the model started from and `model-index`."""
    start = str(source.facts.get("pretrained") or "")
    results = [
        EvalResult(
            task_type="text-retrieval",
            dataset_type=name.rpartition(" ")[0] or "unnamed",
            dataset_name=name.rpartition(" ")[0] or "unnamed",
            metric_type=name.rpartition(" ")[2],
            metric_value=value,
        )
        for name, value in source.metrics.items()
    ]
    data = ModelCardData(
        license=source.license,
        library_name=texts.library,
        pipeline_tag="sentence-similarity",
        tags=["taser_jax", "dense-retrieval", *texts.tags],
        base_model=start if _HUB_ID.fullmatch(start) else None,
        model_name=source.config.describe().title if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _summary(source: ExportSource) -> str:
    scored = "do not normalise embeddings, and do not score by cosine"
    if source.config.normalization is Normalization.L2:
        scored = "embeddings have length 1 already, so that this is their cosine"
    return (
        f"A passage's score for a query is the dot product of two embeddings of "
        f"{source.config.embedding_dim} numbers, float32; {scored}. "
        f"{source.config.describe().embedding}\n\n{_tokens(source)}\n"
        "Lengths include special tokens. Longer texts are truncated at the end; passages token by "
        "token, from the longer of title and text.\n"
    )


def _tokens(source: ExportSource) -> str:
    description = source.config.describe()
    first, last = description.first_token, description.last_token
    settings = source.query_settings
    prompt = "prompt " if settings.prompt else ""
    start = f"{first}prompt " if source.passage_prompt else first
    passage = f"`{start}text{last}`"
    if source.titles is Titles.INCLUDE:
        passage = f"`{start}title{last} text{last}`, without title {passage}"
    elif source.titles is Titles.JOIN:
        passage = f"`{start}title text{last}`, without title {passage}"
    rows = (
        "| Role | Tokens | At most |\n|---|---|---|\n"
        f"| query | `{first}{prompt}text{last}` | {source.query_length} |\n"
        f"| passage | {passage} | {source.passage_length} |\n"
    )
    if settings.normalization is QueryNormalization.CURLY_APOSTROPHE:
        rows += "\nIn queries, ’ is replaced by ' before tokenisation."
    if settings.prompt:
        rows += f"\nThe prompt is the token ids {list(settings.prompt)}."
    if source.passage_prompt:
        rows += f"\nThe prompt of passages is the token ids {list(source.passage_prompt)}."
    if source.titles is Titles.OMIT:
        rows += "\nPassages were encoded without their titles."
    return rows


def _tables(source: ExportSource) -> str:
    """Model, training and metrics."""
    count = f"{parameter_count(source.params):,}"
    of_model = source.config.describe().facts
    model = {"parameters": count, **{name: plain(fact) for name, fact in of_model}}
    facts = {name.replace("_", " "): _without_folder(v) for name, v in source.facts.items()}
    training = {
        "model fingerprint": f"`{source.fingerprint}`",
        "vocabulary fingerprint": f"`{source.vocabulary.fingerprint}`",
        **{name: plain(value) for name, value in facts.items() if value is not None},
    }
    if source.task is not None:
        training["task"] = plain(source.task)
    metrics = {plain(name): f"{value:.4f}" for name, value in source.metrics.items()}
    return (
        f"## Model\n\n{_table(model)}\n`{EXPORT_FILE}` has all settings, under `model`.\n\n"
        f"## Training and data\n\n{_table(training)}\n## Metrics\n\n"
        + (_table(metrics) if metrics else "None were given to the export.\n")
    )


def _configuration(source: ExportSource) -> str:
    if not source.config_text.strip():
        return ""
    text = without_folders(source.config_text).strip()
    # Longer than any in the text, which therefore stays within.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`*", text))))
    return (
        "## Training configuration\n\nOnly the last part of folder paths is shown. Gin files can "
        "import modules, which runs their code: read one from elsewhere before you use it.\n\n"
        f"{fence}\n{text}\n{fence}\n"
    )


def without_folders(config_text: str) -> str:
    """Gin text with paths from / or ~ reduced to their last part, since a card is read elsewhere.

    Example:
        >>> without_folders("TOKEN_STORE = '/data/me/tokens'")
        "TOKEN_STORE = 'tokens'"
    """
    return re.sub(r"""(['"])(?:/|~|\w+://)[^'"]*?([^/'"]*)/?\1""", r"\1\2\1", config_text)


def _without_folder(value: object) -> object:
    """A fact with paths reduced to their last part, as in the configuration."""
    if isinstance(value, str):
        return without_folders(f'"{value}"')[1:-1]
    if isinstance(value, Mapping):
        return {_without_folder(name): _without_folder(part) for name, part in value.items()}
    return [_without_folder(part) for part in value] if isinstance(value, list | tuple) else value


def _table(rows: Mapping[str, object]) -> str:
    cells = (f"| {name} | {value} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *cells, ""])
