"""SeqIO tasks on the small collections of tests, registered as a user's module would."""

from taser_jax.data.text.preprocessors import Prompt, TaskPrompt
from taser_jax.tasks import add_retrieval_mixture, add_retrieval_task

TASKS = ("summary", "code")

for _task in TASKS:
    add_retrieval_task(f"small_{_task}", collection="small", task=_task)
add_retrieval_mixture("small", [f"small_{_task}" for _task in TASKS], default_rate=1.0)

# In KILT's formats, with TACO-DR's prompts for T5: task -> name in its prompt, tokens of a query.
KILT_TASKS = {"fever": ("FEVER", 24), "nq": ("NQ", 16)}

for _task, (_name, _length) in KILT_TASKS.items():
    add_retrieval_task(
        f"small_kilt_{_task}",
        collection="small_kilt",
        task=_task,
        prompt=TaskPrompt(Prompt.NAME, name=_name, separator="<extra_id_1>"),
        query_length=_length,
    )
add_retrieval_mixture("small_kilt", [f"small_kilt_{_task}" for _task in KILT_TASKS])

# Of `commands/test_own_passages.py`.
add_retrieval_task("arguments_arguana", collection="arguments", task="arguana")
add_retrieval_mixture("arguments", ["arguments_arguana"], default_rate=1.0)
