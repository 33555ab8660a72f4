"""Open-domain question answering over one merged collection, as DPR and TASER train it.

`taser prepare` with the passages and questions of both sets makes the collection "open_qa". To add
a set: one more name in `TASKS`.
"""

from taser_jax.tasks import QueryNormalization, add_retrieval_mixture, add_retrieval_task

TASKS = ("nq", "squad")

for _task in TASKS:
    add_retrieval_task(
        f"open_qa_{_task}",
        collection="open_qa",
        task=_task,
        normalization=QueryNormalization.CURLY_APOSTROPHE,
    )

add_retrieval_mixture("open_qa", [f"open_qa_{task}" for task in TASKS])
