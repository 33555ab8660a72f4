"""The built-in collection's tasks (`taser prepare pydocs`): docstrings, asked in six ways."""

from taser_jax.tasks import add_retrieval_mixture, add_retrieval_task

TASKS = ("summary", "parameter", "example", "code", "see_also", "lookup")

for _task in TASKS:
    add_retrieval_task(f"pydocs_{_task}", collection="pydocs", task=_task)

# Each task's share of the batches is its share of the queries: every query once an epoch.
add_retrieval_mixture("pydocs", [f"pydocs_{task}" for task in TASKS])
