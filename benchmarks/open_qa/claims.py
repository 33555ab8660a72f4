"""TASER's claims, from the finished seeds of benchmarks/open_qa/claims.sh.

    python benchmarks/open_qa/claims.py OUTPUT_DIR

reads OUTPUT_DIR/seed-*/{results,per_query}, writes OUTPUT_DIR/claims.md and prints it: the effect
of every claim on R@k, averaged over both sets and on each, with intervals over queries and seeds.
OUTPUT_DIR/claims.json has those over both sets. Claims 1 to 4 of docs/claims.md are about random
weights; from pretrained ones TASER is to be level with DPR, with a margin of a point.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

from taser_jax.commands.pipelines.retrieval_stages import BM25, row_name
from taser_jax.evaluation.results import read_results

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Combined, Pair, find, markdown, registered, write_json
from seed_rows import Row, on_tasks, read_rows, seed_folders

MEASURES = ("R@1", "R@5", "R@20", "R@100")
DPR, SHARED, DET_R = "DPR", "Shared", "TASER Det-R"
UNTRAINED = "Pretrained, untrained"
COMMAND = "benchmarks/open_qa/claims.sh SOURCE_DIR OUTPUT_DIR"
ROUTERS = ("TASER Seq-R", "TASER Tok-R")
LEARNED = (ROUTERS[0], "TASER Seq-R, token mean", ROUTERS[1])
MARGIN = -1.0


def main() -> None:
    """Writes and prints the claims."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    rows = read_rows({seed: [folder] for seed, folder in seed_folders(root).items()})
    command = f"{COMMAND} PRETRAINED" if UNTRAINED in rows else COMMAND
    seeds = [tasks for row in rows.values() for tasks in row.values()]
    tasks = list(dict.fromkeys(task for tasks in seeds for task in tasks))
    blocks, averages = [parameters(root)], []
    for measure in MEASURES:
        findings = find(all_claims(rows), measure, command=command)
        averages += findings
        blocks += [f"### {measure}, average", markdown(findings)]
        for task in tasks:
            on_task = {name: on_tasks(row, [task]) for name, row in rows.items()}
            findings = find(all_claims(on_task), measure, command=command)
            blocks += [f"### {measure}, {task}", markdown(findings)]
    write_json(averages, root / "claims.json")
    text = "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"
    (root / "claims.md").write_text(text, encoding="utf-8")
    print(text)


def all_claims(rows: Mapping[str, Row]) -> list[Claim]:
    """Those of docs/claims.md, then one for each pair of rows.

    (a) TASER over DPR and over the other encoders, (b) each encoder's mined negatives over BM25's,
    (c) each hybrid over the encoder and over BM25.
    """

    def compared(text: str, first: str, second: str) -> Pair:
        return Pair(text, rows.get(first, {}), rows.get(second, {}))

    over_encoder = {
        other: compared(f"{DET_R} over {other}", row_name(DET_R, 2), row_name(other, 2))
        for other in (DPR, SHARED, *LEARNED)
    }
    mined = {
        system: compared(
            f"{system}: mined negatives over BM25's", row_name(system, 2), row_name(system, 1)
        )
        for system in (DPR, SHARED, DET_R, *LEARNED)
    }
    hybrids = {
        system: [
            compared(f"{system} + BM25 over {part}", f"{system} + BM25", row)
            for part, row in ((system, row_name(system, 2)), (BM25, BM25))
        ]
        for system in (DPR, DET_R)
    }
    if UNTRAINED in rows:
        level = over_encoder[DPR]
        main_claims = [Claim(f"{level.text}, non-inferiority", [level], smallest=MARGIN)]
    else:
        learned = [over_encoder[router] for router in ROUTERS]
        main_claims = [
            registered(1, [over_encoder[DPR]]),
            registered(2, [mined[system] for system in (DPR, SHARED, DET_R)]),
            registered(3, hybrids[DET_R], Combined.SMALLEST),
            registered(4, learned, Combined.SMALLEST),
        ]
    lettered = [
        *(("a", pair) for pair in over_encoder.values()),
        *(("b", pair) for pair in mined.values()),
        *(("c", pair) for pairs in hybrids.values() for pair in pairs),
    ]
    return main_claims + [Claim(f"({letter}) {pair.text}", [pair]) for letter, pair in lettered]


def parameters(root: pathlib.Path) -> str:
    """What TASER has of DPR's parameters."""
    counts = {
        result.system: result.parameters
        for directory in sorted(root.glob("seed-*/results"))
        for result in read_results(directory)
    }
    taser, dpr = counts.get(row_name(DET_R, 2)), counts.get(row_name(DPR, 2))
    if not taser or not dpr:
        return "Not finished."
    return f"{DET_R} has {taser:,} parameters, {taser / dpr:.2f} of DPR's {dpr:,}."


if __name__ == "__main__":
    main()
