"""SeqIO tasks of the two sets that beir.sh prepares."""

from taser_jax.tasks import add_retrieval_task

for _name in ("scifact", "medquad"):
    add_retrieval_task(_name, collection=_name)
