"""MoMA's rows and claims, from the finished seeds of benchmarks/moma_mini/run.sh.

    python benchmarks/moma_mini/table.py OUTPUT_DIR [--gate]

reads OUTPUT_DIR/seed-*, writes OUTPUT_DIR/{moma.md,claims.json} and prints moma.md: the rows of the
source and of all targets together, nDCG@10 as mean over seeds with standard deviation; each row
against no memory, with intervals over queries and over seeds; and how the memories shared attention
and documents. With --gate the source's last episode is the gate of claim 9.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Finding, Pair, find, gate, markdown, over, registered, write_json
from seed_rows import Row, on_tasks, read_rows, seed_folders, spread_table

MEASURE = "nDCG@10"
BASELINE, LEARNED = "No memory", "MoMA"
COMMAND = "benchmarks/moma_mini/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED"
GATE_COMMAND = "benchmarks/moma_mini/gate.sh SHARED_DATA OUTPUT_DIR PRETRAINED"
# What the gate of claim 9 asks, in points.
OPENS_AT = 0.3
# Those of claim 9.
TARGETS = ("scifact", "medquad", "fm2", "climate_fever")


def main() -> None:
    """Writes and prints the tables."""
    if not (len(sys.argv) == 2 or sys.argv[2:] == ["--gate"]):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root, is_gate = pathlib.Path(sys.argv[1]), len(sys.argv) == 3
    seeds = seed_folders(root)
    blocks = [f"{MEASURE}, seeds {', '.join(map(str, seeds))}."]
    all_findings: list[Finding] = []
    for title, folders in (
        ("Source", {seed: [seed_dir] for seed, seed_dir in seeds.items()}),
        ("Targets", {seed: sorted(seed_dir.glob("targets/*")) for seed, seed_dir in seeds.items()}),
    ):
        named_rows = read_rows(folders)
        if named_rows:
            command = GATE_COMMAND if is_gate else COMMAND
            findings = find(claims(named_rows), MEASURE, command=command)
            pair = last_episode(named_rows) if is_gate else None
            if pair is not None and pair.seeds:
                findings.insert(0, gate(9, pair, MEASURE, opens_at=OPENS_AT, command=command))
            all_findings += findings
            blocks += [f"### {title}", spread_table(named_rows, MEASURE), markdown(findings)]
    shares = [line for seed, seed_dir in seeds.items() for line in attention_lines(seed, seed_dir)]
    if shares:
        blocks += ["### Attention and documents by memory, in per cent", "\n".join(shares)]
    text = "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"
    (root / "moma.md").write_text(text, encoding="utf-8")
    write_json(all_findings, root / "claims.json")
    print(text)


def claims(named_rows: Mapping[str, Row]) -> list[Claim]:
    """Claim 9 of docs/claims.md, and every trained row against the last one without memory."""
    baselines = [name for name in named_rows if name.startswith(BASELINE)]
    if not baselines:
        return []
    last = sorted(baselines)[-1]
    beside = [over(name, last, named_rows) for name in named_rows if name.startswith(LEARNED)]
    learned, none = (on_tasks(named_rows.get(name, {}), TARGETS) for name in (LEARNED, BASELINE))
    return [registered(9, [Pair(f"{LEARNED} over {BASELINE}", learned, none)]), *beside]


def last_episode(named_rows: Mapping[str, Row]) -> Pair | None:
    """The learned lookup over no memory after the last episode that both have finished."""
    for name in sorted(named_rows, reverse=True):
        learned = name.replace(BASELINE, LEARNED)
        if name.startswith(BASELINE) and learned in named_rows:
            return Pair(
                f"{learned} over {name}, on validation questions",
                named_rows[learned],
                named_rows[name],
            )
    return None


def attention_lines(seed: int, directory: pathlib.Path) -> list[str]:
    """Figure 2's numbers, a line for each episode and task."""
    lines = []
    for path in sorted(directory.glob("stages/*-distil.json")):
        for shares in json.loads(path.read_text(encoding="utf-8"))["outputs"]["attention"]:
            by_memory = ", ".join(
                f"{memory}: {100 * shares['attention'][memory]:.1f} of attention, "
                f"{100 * shares['documents'][memory]:.1f} of documents"
                for memory in shares["attention"]
            )
            gold = f"{100 * shares['queries_with_gold']:.1f} of queries have a relevant document"
            label = path.stem.removesuffix("-distil")
            lines.append(f"- seed {seed}, {label}, {shares['task']}: {by_memory}; {gold}")
    return lines


if __name__ == "__main__":
    main()
