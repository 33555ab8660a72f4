"""The built-in collection's tasks behind four kinds of prompts, as SeqIO mixtures."""

from taser_jax.tasks import Family, Prompt, TaskPrompt, add_retrieval_mixture, add_retrieval_task

# Task -> the sentence before its queries, and its family. The families' names are KILT's; all that
# counts is that each has a token of its own: text about an object, code, relations of objects.
TASKS = {
    "summary": ("the documentation that this sentence begins: ", Family.QUESTION_ANSWERING),
    "parameter": ("the documentation of what has this parameter: ", Family.QUESTION_ANSWERING),
    "example": ("the documentation of what this example shows: ", Family.FACT_CHECKING),
    "code": ("the documentation of this code: ", Family.FACT_CHECKING),
    "see_also": ("the documentation of what is described so: ", Family.SLOT_FILLING),
    "lookup": ("the documentation of what has this name: ", Family.SLOT_FILLING),
}

for _task, (_sentence, _family) in TASKS.items():
    _prompts = {
        "none": TaskPrompt(),
        "marker": TaskPrompt(Prompt.MARKER, family=_family),
        "name": TaskPrompt(Prompt.NAME, name=_task.replace("_", " ")),
        "sentence": TaskPrompt(Prompt.TEXT, text=_sentence),
    }
    for _kind, _prompt in _prompts.items():
        add_retrieval_task(
            f"pydocs_{_kind}_{_task}", collection="pydocs", task=_task, prompt=_prompt
        )
for _kind in ("none", "marker", "name", "sentence"):
    add_retrieval_mixture(f"pydocs_{_kind}", [f"pydocs_{_kind}_{task}" for task in TASKS])
