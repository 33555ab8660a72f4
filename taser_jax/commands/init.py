"""`taser init`: the files of a new project."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from taser_jax.storage.artifacts import write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

_GIN = """\
# {name}: paths and names of one project. Every command takes this file alone:
#
#     taser prepare --gin_file={slug}.gin
#
# What only one run changes is set on the command line: --gin.TRAIN_STEPS=1000.

include 'models/bert_tiny.gin'
include 'models/taser.gin'

# Your files: passages (id, text, title), questions (id, text) and judgements (question, 0, passage,
# relevance), separated by tabs, in passages.tsv, TASK.SPLIT.queries.tsv and TASK.SPLIT.qrels.tsv;
# a split is train, validation or test. Files of other formats are detected, too.
COLLECTION = '{slug}'
DIRECTORIES = ['{slug}']

# The tasks: {slug}_tasks.py.
MIXTURE_OR_TASK_MODULE = '{slug}_tasks'
MIXTURE_OR_TASK_NAME = '{slug}'
TASK_FEATURE_LENGTHS = {{'query': 32, 'passage': 128}}
VOCAB_SIZE = 2000

# The model: TASER, small enough for two CPU cores. From random weights the mean over tokens learns
# faster than [CLS].
SYSTEM = 'TASER'
DualEncoderConfig.pooling = 'mean'
BATCH_SIZE = 32
TRAIN_STEPS = 300
WARMUP_STEPS = 30
LEARNING_RATE = 1e-3

# What commands write, and what later ones read.
DATA_DIR = '{slug}/data'
VOCABULARY = '{slug}/vocabulary'
TOKEN_STORE = '{slug}/tokens'
MODEL_DIR = '{slug}/model'
EMBEDDINGS_DIR = '{slug}/embeddings'
INDEX_DIR = '{slug}/index'
RUNS_DIR = '{slug}/runs'
BM25_INDEX_DIR = '{slug}/bm25/index'
BM25_RUNS_DIR = '{slug}/bm25/runs'
HYBRID_RUNS_DIR = '{slug}/hybrid'
NEGATIVES_DIR = '{slug}/negatives'
EVAL_OUTPUT_DIR = '{slug}/results'
EXPORT_DIR = '{slug}/export'
OUTPUT_DIR = '{slug}/pipeline'
"""

_TASKS = '''\
"""{name}'s tasks, for `taser tokenize`: prompts, filters and rates are set here."""

from taser_jax.tasks import add_retrieval_mixture, add_retrieval_task

# As in the names of the files: {slug}/{first}.train.queries.tsv.
TASKS = {tasks}

for _task in TASKS:
    add_retrieval_task(f"{slug}_{{_task}}", collection="{slug}", task=_task)
add_retrieval_mixture("{slug}", [f"{slug}_{{_task}}" for _task in TASKS])
'''

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
    texts = {
        pathlib.Path(directory, f"{slug}.gin"): _GIN.format(**values),
        pathlib.Path(directory, f"{slug}_tasks.py"): _TASKS.format(**values),
    }
    if existing := [str(path) for path in texts if path.exists()]:
        problem = f"{' and '.join(existing)} exist, and nothing is overwritten"
        raise ConfigError(problem, where=directory, fix="choose another name, or delete them")
    for path, text in texts.items():
        write_text(path, text, recorded=False)
        logger.info("wrote %s", path)
    logger.info("next: put your files below %s/ as %s.gin describes, then run", slug, slug)
    for step in _STEPS:
        # The file names a module, whose code runs.
        flag = f" --gin_import={slug}_tasks" if step == "tokenize" else ""
        logger.info("  taser %s --gin_file=%s.gin%s", step, slug, flag)
