"""Two tasks on a small collection in KILT's formats, with TACO-DR's prompts for T5."""

from taser_jax.data.seqio_tasks.registry import add_retrieval_mixture, add_retrieval_task
from taser_jax.data.text.preprocessors import Prompt, TaskPrompt

# Task -> name in its prompt, tokens of a query.
TASKS = {"fever": ("FEVER", 24), "nq": ("NQ", 16)}

for _task, (_name, _length) in TASKS.items():
    add_retrieval_task(
        f"small_kilt_{_task}",
        collection="small_kilt",
        task=_task,
        prompt=TaskPrompt(Prompt.NAME, name=_name, separator="<extra_id_1>"),
        query_length=_length,
    )
add_retrieval_mixture("small_kilt", [f"small_kilt_{_task}" for _task in TASKS])
