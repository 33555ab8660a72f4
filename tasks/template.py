"""Copy this file to define a retrieval task on a collection of your own; keep what you need.

taser prepare ...                                 # makes the collection "my_collection"
taser tokenize --gin.MIXTURE_OR_TASK_MODULE=my_tasks --gin.MIXTURE_OR_TASK_NAME=my_mixture
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taser_jax.tasks import QueryNormalization, add_retrieval_mixture, add_retrieval_task

if TYPE_CHECKING:
    import tensorflow as tf


def ask_politely(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Puts words before every query, while it is still text; needs the extra `tensorflow`."""
    return dataset.map(lambda example: {**example, "query": "please find: " + example["query"]})


add_retrieval_task("my_questions", collection="my_collection", task="questions")
add_retrieval_task(
    "my_claims",
    collection="my_collection",
    task="claims",
    normalization=QueryNormalization.CURLY_APOSTROPHE,
    query_preprocessors=[ask_politely],
)
# Two batches of questions to one of claims.
add_retrieval_mixture("my_mixture", [("my_questions", 2.0), ("my_claims", 1.0)])
