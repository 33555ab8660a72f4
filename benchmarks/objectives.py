"""What Matryoshka dimensions change: trainings that differ in nothing else.

    python benchmarks/objectives.py --data=DIR --out=DIR --pretrained=minilm [--set=scifact]
        [--seeds=0,1,2] [--steps=100] [--train=1000] [--test=500] [--passages=4000]

Two trainings a seed, of the last block, on the same batches of 16 queries with three of BM25's
hard negatives each: on labels; and Matryoshka, the sum of the losses on the first 64, 128 and all
dimensions. It helps if the interval of its nDCG@10 over labels alone, over queries, lies above
zero with 64 dimensions, to which both are cut. What it costs with all dimensions stands beside it.

DIR and the sets are those of benchmarks/never_worse.py. A finished stage is not run again. Writes
OUT/claims.json and OUT/claims.md.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import never_worse
from claims import find, markdown, over, write_json
from seed_rows import Row, read_row, spread_table

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.commands.mine import mine
from taser_jax.commands.pipelines.compare_parts import prepare_detected, with_weights
from taser_jax.commands.pipelines.retrieval_stages import RetrievalStages, Setting
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.search import search
from taser_jax.commands.tokenize import tokenize
from taser_jax.commands.train import train
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.interop.pretrained import Pretrained
from taser_jax.models.bert_config import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining import MiningConfig
from taser_jax.storage.artifacts import file_name
from taser_jax.training.loop import LoopConfig
from taser_jax.training.objective import ObjectiveConfig

MEASURES = ("nDCG@10", "R@20")
BATCH_SIZE, NEGATIVES = 16, 3
FEW = 64
LENGTHS = {"query": 32, "passage": 96}
TEMPERATURE = 0.05
LABELS, MATRYOSHKA = "labels", "Matryoshka"
ROWS = (LABELS, MATRYOSHKA)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is not finished, and prints the claims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pretrained", default="minilm")
    parser.add_argument("--set", default="scifact", choices=never_worse.SETS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--train", type=int, default=1000, help="training queries, at most")
    parser.add_argument("--test", type=int, default=500, help="test queries, at most")
    parser.add_argument("--passages", type=int, default=4000, help="beside all positives")
    options = parser.parse_args(arguments)
    prepare(options)
    untrained(options)
    for seed in options.seeds.split(","):
        for name in ROWS:
            run(name, int(seed), options)
    report(options)


def prepare(options: argparse.Namespace) -> None:
    """The set as a collection, and its tokens."""
    folder = options.out / "beir" / options.set
    if not folder.exists():
        data = never_worse.read_set(
            options.data, options.set, train=options.train, test=options.test
        )
        never_worse.write_cell(data, folder, size=None, passages=options.passages)
    stages = Stages(options.out)
    stages.run(
        "prepare",
        prepare_detected,
        directories=[folder],
        checksums={},
        data_dir=options.out / "data",
        collection=options.set,
    )
    stages.run(
        "tokenize",
        tokenize,
        data_dir=options.out / "data",
        output_dir=options.out / "tokens",
        vocabulary=options.pretrained,
        feature_lengths=LENGTHS,
        mixture_or_task=options.set,
    )


def setting(
    options: argparse.Namespace, root: pathlib.Path, *, seed: int, objective: str
) -> Setting:
    """What the stages of one training share."""
    bert = model(options).bert
    training = TrainingConfig(
        LoopConfig(train_steps=options.steps),
        BatchingConfig(batch_size=BATCH_SIZE, num_negatives=NEGATIVES, seed=seed),
        OptimizerConfig(learning_rate=5e-5, warmup_steps=options.steps // 10),
        objective_of(objective, bert.embed_dim),
        pretrained=Pretrained(options.pretrained),
        train_from_block=bert.num_layers - 1,
        states_dir=str(options.out / "states"),
        seed=seed,
    )
    return Setting(
        output_dir=str(root),
        data_dir=str(options.out / "data"),
        token_store=str(options.out / "tokens"),
        training=training,
        evaluation=EvaluationConfig(measures=MEASURES),
    )


def objective_of(row: str, dim: int) -> ObjectiveConfig:
    """A row's objective, for a model with so many dimensions."""
    return ObjectiveConfig(
        temperature=TEMPERATURE, matryoshka_dims=(FEW, 2 * FEW, dim) if row == MATRYOSHKA else ()
    )


def model(options: argparse.Namespace) -> DualEncoderConfig:
    """The pretrained encoder, without dropout."""
    bert = BertConfig(dropout_rate=0.0, attention_dropout_rate=0.0)
    weights = with_weights(DualEncoderConfig(bert), options.pretrained, dtype="float32")
    assert isinstance(weights, DualEncoderConfig)
    return weights


def untrained(options: argparse.Namespace) -> None:
    """The untrained model's and BM25's rows, and BM25's hard negatives."""
    root = options.out / "untrained"
    stages = RetrievalStages(setting(options, root, seed=0, objective=LABELS))
    stages.bm25(("train", "test"))
    stages.import_model("untrained", model(options))
    stages.retrieve("untrained", splits=("test",))
    stages.evaluate("untrained", "untrained", parameters=None)
    stages.stages.run(
        "mine",
        mine,
        runs_dir=root / "bm25" / "runs",
        output_dir=root / "negatives",
        config=MiningConfig(count=NEGATIVES),
        **stages.common,
    )


def run(name: str, seed: int, options: argparse.Namespace) -> None:
    """Trains under one objective, and evaluates with all dimensions and with a few."""
    label, output = file_name(name), options.out / f"seed-{seed}"
    root, shared = output / label, setting(options, output, seed=seed, objective=name)
    stages = RetrievalStages(shared)
    negatives = str(options.out / "untrained" / "negatives")
    stages.stages.run(
        f"{label}-train",
        train,
        model_dir=root / "model",
        data=TrainingData(shared.token_store, negatives_dirs=[negatives]),
        model=model(options),
        training=shared.training,
    )
    stages.retrieve(label, splits=("test",))
    stages.evaluate(name, label, parameters=None)
    stages.stages.run(
        f"{label}-search-{FEW}",
        search,
        embeddings_dir=root / "embeddings",
        index_dir=root / f"index-{FEW}",
        output_dir=output / f"{label}-{FEW}" / "runs",
        config=IndexConfig(dim=FEW),
        **stages.common,
    )
    stages.evaluate(cut(name), f"{label}-{FEW}", parameters=None)


def cut(name: str) -> str:
    """The row of a training whose embeddings are cut to their first dimensions."""
    return f"{name}, {FEW} dimensions"


def report(options: argparse.Namespace) -> None:
    """claims.md and claims.json."""
    rows: dict[str, Row] = {
        name: {0: read_row(options.out / "untrained", name)} for name in ("BM25", "untrained")
    }
    seeds = {int(seed): options.out / f"seed-{seed}" for seed in options.seeds.split(",")}
    for name in (*ROWS, *map(cut, ROWS)):
        rows[name] = {seed: read_row(folder, name) for seed, folder in seeds.items()}
    pairs = [(LABELS, "untrained"), (MATRYOSHKA, LABELS)]
    pairs += [(cut(MATRYOSHKA), cut(LABELS)), (cut(LABELS), LABELS)]
    claims = [over(first, second, rows) for first, second in pairs]
    findings, blocks = [], []
    for measure in MEASURES:
        of_measure = find(claims, measure, command="benchmarks/objectives.py")
        findings += of_measure
        blocks.append(f"### {measure}\n\n{spread_table(rows, measure)}\n\n{markdown(of_measure)}")
    write_json(findings, options.out / "claims.json")
    (options.out / "claims.md").write_text("\n".join(blocks), encoding="utf-8")
    print("\n".join(blocks))


if __name__ == "__main__":
    main()
