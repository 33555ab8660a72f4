"""KILT's eight tasks with the lengths and prompts of TACO-DR (Table 5).

`taser prepare --gin_file=runs/kilt_full_prepare.gin` makes the collection "kilt", with the tasks
below. `kilt_prompts` names their four mixtures.
"""

from taser_jax.tasks import Family
from taser_jax.tasks.kilt_prompts import add_mixtures

# Task of the collection -> name in its prompt, family, tokens of a query.
TASKS = {
    "nq": ("NQ", Family.QUESTION_ANSWERING, 32),
    "tqa": ("TQA", Family.QUESTION_ANSWERING, 32),
    "hopo": ("HOPO", Family.QUESTION_ANSWERING, 36),
    "wow": ("WOW", Family.DIALOGUE, 256),
    "trex": ("TREX", Family.SLOT_FILLING, 32),
    "fever": ("FEVER", Family.FACT_CHECKING, 64),
    "zsre": ("ZSRE", Family.SLOT_FILLING, 32),
    "aida": ("AIDA", Family.ENTITY_LINKING, 128),
}

add_mixtures("kilt", TASKS)
