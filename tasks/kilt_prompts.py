"""Four mixtures of one collection's tasks, by what is put before the queries; registers none."""

from collections.abc import Mapping

from taser_jax.tasks import Family, Prompt, TaskPrompt, add_retrieval_mixture, add_retrieval_task

# End of a mixture's name -> kind of prompt, and what separates it from the query (None: the end of
# a text).
_PROMPTS = {
    "": (Prompt.NONE, None),
    "_name": (Prompt.NAME, None),
    "_name_t5": (Prompt.NAME, "<extra_id_1>"),
    "_marker": (Prompt.MARKER, None),
}


def add_mixtures(collection: str, tasks: Mapping[str, tuple[str, Family, int]]) -> None:
    """Registers a collection's tasks in mixtures that are named after it.

    "kilt" puts nothing before the queries, "kilt_name" the task's name and the end of a text,
    "kilt_name_t5" the name and <extra_id_1> as in TACO-DR's code (a T5 vocabulary with extra ids),
    "kilt_marker" its family's marker.

    Args:
        collection: its name, such as "kilt".
        tasks: task of the collection -> name in its prompt, family, tokens of a query.
    """
    for ending, (prompt, separator) in _PROMPTS.items():
        mixture = f"{collection}{ending}"
        for task, (name, family, length) in tasks.items():
            add_retrieval_task(
                f"{mixture}_{task}",
                collection=collection,
                task=task,
                prompt=TaskPrompt(prompt, name=name, family=family, separator=separator),
                query_length=length,
            )
        add_retrieval_mixture(mixture, [f"{mixture}_{task}" for task in tasks])
