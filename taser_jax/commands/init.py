"""`taser init`: the files of a new project."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from taser_jax.storage.artifacts import write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

# Ends of the files' names, and texts with {fields}, in the folder of this module.
_TEMPLATES = {
    end: pathlib.Path(__file__).with_name(f"project{end}.template") for end in (".gin", "_tasks.py")
}
_STEPS = ("prepare", "tokenize", "train", "encode", "search", "evaluate")


def init(*, name: str, tasks: Sequence[str] = ("questions",), directory: str = ".") -> None:
    """Writes a project's Gin file, which every command takes, and its task module.

    Example:
        `taser init FAQ` writes `faq.gin` and `faq_tasks.py`.

    Args:
        name: the project's name. Files and collection are named after it, in lower case, with _ in
            place of anything but ASCII letters and digits.
        tasks: names of its tasks, as in the names of its files.
        directory: where the two files go.

    Raises:
        ConfigError: a name without a letter at its start, no task, or a file that exists.
    """
    slug = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")
    if not slug.isidentifier():
        problem = f"the name {name!r} does not start with a letter"
        raise ConfigError(problem, where="init.name", fix="write `taser init FAQ`")
    if not tasks:
        raise ConfigError("no task is given", where="init.tasks", fix="name one or more")
    values = {"name": name, "slug": slug, "tasks": repr(tuple(tasks)), "first": tasks[0]}
    templates = {end: file.read_text(encoding="utf-8") for end, file in _TEMPLATES.items()}
    texts = {
        pathlib.Path(directory, f"{slug}{end}"): template.format(**values)
        for end, template in templates.items()
    }
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
