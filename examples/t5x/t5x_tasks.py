"""A SeqIO task for T5X; TOKEN_STORE, TASK and NEGATIVES_DIR are environment variables."""

import os

from taser_jax.interop.t5x_model import add_t5x_task

add_t5x_task(
    "retrieval",
    token_store=os.environ["TOKEN_STORE"],
    task=os.environ["TASK"],
    negatives_dir=os.environ.get("NEGATIVES_DIR"),
)
