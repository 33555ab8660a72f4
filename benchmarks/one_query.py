"""What one query costs: `Retriever.search` beside sentence-transformers' encode and dot product.

    taskset -c 0 python benchmarks/one_query.py [--pretrained minilm] [--passages 10000]

Both sides answer the same questions one at a time, in turns, over the same passages in memory, with
one thread. Prints one JSON line a figure: the machine, the milliseconds of each side by the clock
and of CPU time (which other jobs on the machine change less), and how many questions have the same
first passage on both sides.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np
from side_by_side import machine, show

from taser_jax import Passage, Retriever
from taser_jax.interop.hub import fetch

QUESTIONS = (
    "which river runs through the capital of France?",
    "how do I sort a list",
    "what is the effect of vitamin D on bone density in elderly women",
    "who wrote the first dictionary?",
)
_WORDS = (
    "river", "capital", "list", "sort", "vitamin", "bone", "dictionary", "France", "author", "page",
)  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", default="minilm")
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    show({"figure": "machine", **machine("torch", "sentence-transformers"), **vars(arguments)})
    draws = random.Random(0)
    texts = [" ".join(draws.choices(_WORDS, k=8)) for _ in range(arguments.passages)]

    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    directory = fetch(arguments.pretrained)
    retriever = Retriever.from_pretrained(directory)
    retriever.add([Passage(id=str(row), text=text) for row, text in enumerate(texts)])
    theirs = SentenceTransformer(str(directory), device="cpu")
    matrix = theirs.encode(texts)

    def search(question: str) -> int:
        (hits,) = retriever.search([question], k=10)
        return int(hits[0].passage.id)

    def encode_and_multiply(question: str) -> int:
        scores = (theirs.encode([question]) @ matrix.T)[0]
        best = np.argpartition(-scores, 10)[:10]
        return int(best[np.argmax(scores[best])])

    sides = {"search": search, "sentence-transformers": encode_and_multiply}
    first = {name: [side(question) for question in QUESTIONS] for name, side in sides.items()}
    agreeing = sum(ours == others for ours, others in zip(*first.values(), strict=True))
    times = in_turns(sides, repeats=arguments.repeats)
    for name, (wall, cpu) in times.items():
        show(
            {
                "figure": name,
                "p50_ms": float(np.median(wall)),
                "p95_ms": float(np.percentile(wall, 95)),
                "cpu_p50_ms": float(np.median(cpu)),
            }
        )
    show({"figure": "same first passage", "questions": len(QUESTIONS), "same": agreeing})


def in_turns(
    sides: dict[str, Callable[[str], int]], *, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds by the clock and of CPU time of each side; a question a turn."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sides}
    for turn in range(repeats):
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            side(QUESTIONS[turn % len(QUESTIONS)])
            times[name][0].append(1e3 * (time.perf_counter() - wall))
            times[name][1].append(1e3 * (time.process_time() - cpu))
    return times


if __name__ == "__main__":
    main()
