"""SeqIO tasks of the five domains that run.sh prepares as one collection."""

from taser_jax.tasks import add_retrieval_mixture, add_retrieval_task

TASKS = ("squad", "nq_qed", "medquad", "fewrel", "cmu_dog")

for _task in TASKS:
    add_retrieval_task(f"muf_mini_{_task}", collection="muf_mini", task=_task)
add_retrieval_mixture("muf_mini", [f"muf_mini_{_task}" for _task in TASKS])
