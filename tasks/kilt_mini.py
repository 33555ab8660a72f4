"""Seven tasks of four families over one small collection of Wikipedia passages.

`taser prepare --gin_file=runs/kilt_mini_prepare.gin` makes the collection "kilt_mini".
`kilt_prompts` names the four mixtures of its tasks.
"""

from taser_jax.tasks import Family
from taser_jax.tasks.kilt_prompts import add_mixtures

# Task of the collection -> name in its prompt, family, tokens of a query.
TASKS = {
    "squad": ("SQUAD", Family.QUESTION_ANSWERING, 32),
    "nq_qed": ("NQ", Family.QUESTION_ANSWERING, 32),
    "selqa": ("SELQA", Family.QUESTION_ANSWERING, 32),
    "fm2": ("FM2", Family.FACT_CHECKING, 64),
    "climate_fever": ("CLIMATE", Family.FACT_CHECKING, 64),
    "fewrel": ("FEWREL", Family.SLOT_FILLING, 32),
    "cmu_dog": ("DIALOGUE", Family.DIALOGUE, 128),
}

add_mixtures("kilt_mini", TASKS)
