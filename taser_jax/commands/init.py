"""`taser init`: the files of a new project."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from taser_jax.storage.artifacts import write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

# Ends of the files' names; their texts have {fields}.
_ENDS = (".gin", "_tasks.py")
_STEPS = ("prepare", "tokenize", "train", "encode", "search", "evaluate")


def init(
    *,
    name: str,
    tasks: Sequence[str] = ("questions",),
    directory: str = ".",
    pretrained: str | None = None,
) -> None:
    """Writes a project's Gin file, which every command takes, and its task module.

    Example:
        `taser init FAQ` writes `faq.gin` and `faq_tasks.py`.

    Args:
        name: the project's name. Files and collection are named after it, in lower case, with _ in
            place of anything but ASCII letters and digits.
        tasks: names of its tasks, as in the names of its files.
        directory: where the two files go.
        pretrained: weights to start from, a BERT's: "minilm", a directory or a hub id. None starts
            from random weights.

    Raises:
        ConfigError: a name without a letter at its start, no task, or a file that exists.
        DataError: no such weights.
    """
    slug = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")
    if not slug.isidentifier():
        problem = f"the name {name!r} does not start with a letter"
        raise ConfigError(problem, where="init.name", fix="write `taser init FAQ`")
    if not tasks:
        raise ConfigError("no task is given", where="init.tasks", fix="name one or more")
    values = {"name": name, "slug": slug, "tasks": repr(tuple(tasks)), "first": tasks[0]}
    values |= _scratch(slug) if pretrained is None else _pretrained(pretrained, slug)
    texts = {pathlib.Path(directory, f"{slug}{end}"): _filled(end, **values) for end in _ENDS}
    if existing := [str(path) for path in texts if path.exists()]:
        problem = f"{' and '.join(existing)} exist, and nothing is overwritten"
        raise ConfigError(problem, where=directory, fix="choose another name, or delete them")
    for path, text in texts.items():
        write_text(path, text, recorded=False)
        logger.info("wrote %s", path)
    logger.info("next: put your files below %s/ as %s.gin describes, then run", slug, slug)
    if directory != ".":
        logger.info("  cd %s", directory)
    for step in _STEPS:
        # The file names a module, whose code runs.
        flag = f" --gin_import={slug}_tasks" if step == "tokenize" else ""
        logger.info("  taser %s --gin_file=%s.gin%s", step, slug, flag)


def _scratch(slug: str) -> dict[str, str]:
    """What the project's Gin file says of a model from random weights."""
    model = _filled("_scratch.gin", slug=slug)
    return {"encoder": "models/bert_tiny.gin", "model": model.rstrip()}


def _pretrained(source: str, slug: str) -> dict[str, str]:
    """What it says of pretrained weights: as `taser compare` trains them on a thousand queries."""
    # A second of imports, for which a project without weights does not wait.
    from taser_jax.commands.pipelines import compare_plan
    from taser_jax.interop.hub import fetch, read_encoder_settings
    from taser_jax.interop.pretrained import pretrained_bert
    from taser_jax.models.batch import Normalization

    directory, bert = fetch(source), pretrained_bert(source)
    settings = read_encoder_settings(directory)
    length = settings.longest(bert.max_length)
    blocks = bert.num_layers
    plan = compare_plan.defaults(
        1000, validation=0, blocks=blocks, width=bert.embed_dim, batch_size=32, frozen=blocks // 2
    )
    is_cosine = settings.normalization is Normalization.L2
    model = _filled(
        "_pretrained.gin",
        slug=slug,
        pretrained=source,
        vocabulary=str(directory),
        lengths={"query": min(64, length), "passage": min(256, length)},
        blocks=blocks,
        frozen=plan.frozen_blocks,
        temperature=0.05 if is_cosine else 1.0,
        rate=plan.learning_rate,
    )
    return {"encoder": "models/bert_pretrained.gin", "model": model.rstrip()}


def _filled(end: str, **values: object) -> str:
    """A template in the folder of this module, with its fields filled in."""
    template = pathlib.Path(__file__).with_name(f"project{end}.template")
    return template.read_text(encoding="utf-8").format(**values)
