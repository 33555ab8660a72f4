"""The five domains that run.sh prepares as one collection, as SeqIO tasks."""

from taser_jax.tasks import add_retrieval_mixture, add_retrieval_task

COLLECTION = "muf_mini"
# Task -> the specialist's name in runs/muf_mini.gin.
SPECIALISTS = {
    "squad": "SQuAD",
    "nq_qed": "NQ",
    "medquad": "MedQuAD",
    "fewrel": "FewRel",
    "cmu_dog": "CMU DoG",
}

for _task in SPECIALISTS:
    add_retrieval_task(f"muf_mini_{_task}", collection=COLLECTION, task=_task)
add_retrieval_mixture("muf_mini", [f"muf_mini_{_task}" for _task in SPECIALISTS])
