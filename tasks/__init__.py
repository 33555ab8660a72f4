"""What a module that defines tasks imports, beside the registrations of our own tasks.

    from taser_jax.tasks import add_retrieval_task

    add_retrieval_task("faq", collection="mine")

Importing this loads neither SeqIO nor TensorFlow; a task with `query_preprocessors` needs both.
A module that uses SeqIO's registries itself imports `seqio` first, so that the tasks are there.
"""

from taser_jax.data.seqio_tasks.registry import (
    add_passages,
    add_retrieval_mixture,
    add_retrieval_task,
)
from taser_jax.data.seqio_tasks.registry import remove as remove_task
from taser_jax.data.seqio_tasks.retrieval_task import number_of_queries
from taser_jax.data.text.preprocessors import Family, Prompt, TaskPrompt
from taser_jax.data.token_store.store import QueryNormalization, Titles

__all__ = [
    "Family",
    "Prompt",
    "QueryNormalization",
    "TaskPrompt",
    "Titles",
    "add_passages",
    "add_retrieval_mixture",
    "add_retrieval_task",
    "number_of_queries",
    "remove_task",
]
