"""The claims of docs/claims.md, written down before the runs, and what each takes to be shown."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Registered:
    """A line of docs/claims.md.

    Attributes:
        text: the claim.
        measures: headline measures.
        smallest: the smallest effect that matters, in points; a negative one is a margin.
        seeds: fewest seeds planned.
    """

    text: str
    measures: tuple[str, ...]
    smallest: float
    seeds: int


REGISTERED = {
    1: Registered(
        "TASER is ahead of DPR with at most 0.6 of its parameters", ("R@20",), smallest=1, seeds=3
    ),
    2: Registered("Mined negatives are better than BM25's", ("R@20",), smallest=1, seeds=3),
    3: Registered("A hybrid is ahead of both its parts", ("R@20",), smallest=0.5, seeds=3),
    4: Registered(
        "Routing by role is at least as good as learned routing", ("R@20",), smallest=-1, seeds=3
    ),
    5: Registered(
        "Fused specialists are ahead of one joint model on a domain that the joint model has not "
        "seen",
        ("R@1", "R@20"),
        smallest=1,
        seeds=2,
    ),
    6: Registered(
        "Weights by uncertainty are better than equal weights", ("R@1",), smallest=0.5, seeds=2
    ),
    7: Registered(
        "Task prompts help one retriever for many tasks",
        ("nDCG@10", "PageRprec"),
        smallest=0.5,
        seeds=3,
    ),
    8: Registered(
        "T-SAGE is ahead of the naive sum", ("nDCG@10", "PageRprec"), smallest=0.5, seeds=3
    ),
    9: Registered(
        "Documents of memories help on targets that were not trained on",
        ("nDCG@10",),
        smallest=0.5,
        seeds=2,
    ),
    10: Registered(
        "Specialised blocks are ahead of one shared encoder", ("R@20",), smallest=0.5, seeds=5
    ),
    11: Registered(
        "One fine-tuned retriever reaches BM25 on every task", ("R@20",), smallest=0, seeds=1
    ),
}
