"""SeqIO tasks on the small collections of tests, registered as a user's module would."""

from taser_jax.tasks import add_retrieval_mixture, add_retrieval_task

TASKS = ("summary", "code")

for _task in TASKS:
    add_retrieval_task(f"small_{_task}", collection="small", task=_task)
add_retrieval_mixture("small", [f"small_{_task}" for _task in TASKS], default_rate=1.0)
