"""The SeqIO task of `tests/commands/test_own_passages.py`."""

from taser_jax.data.seqio_tasks.registry import add_retrieval_mixture, add_retrieval_task

add_retrieval_task("arguments_arguana", collection="arguments", task="arguana")
add_retrieval_mixture("arguments", ["arguments_arguana"], default_rate=1.0)
