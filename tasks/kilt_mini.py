"""Seven tasks of four families over one small collection of Wikipedia passages.

`taser prepare kilt` makes the collection "kilt_mini". Three mixtures, by what is put before the
queries: "kilt_mini" nothing, "kilt_mini_name" the task's name, "kilt_mini_marker" its family's
marker.
"""

from taser_jax.data.prompts import Family, Prompt, TaskPrompt
from taser_jax.data.tasks import add_retrieval_mixture, add_retrieval_task

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

for _prompt in Prompt:
    _mixture = "kilt_mini" if _prompt is Prompt.NONE else f"kilt_mini_{_prompt.value}"
    for _task, (_name, _family, _length) in TASKS.items():
        add_retrieval_task(
            f"{_mixture}_{_task}",
            collection="kilt_mini",
            task=_task,
            prompt=TaskPrompt(_prompt, name=_name, family=_family),
            query_length=_length,
        )
    add_retrieval_mixture(_mixture, [f"{_mixture}_{_task}" for _task in TASKS])
