"""Do parameters stay with their task, more than noise would? TACO-DR's Table 4.

    python benchmarks/commitment.py --token_store DIR --output_dir DIR [--betas 0 0.6 0.9 0.99]

trains one model per β with T-SAGE, a batch of every task in each step, and analyses the moving
average that each training used: of the parameters that are task-specific at a checkpoint, the share
that is most sensitive to the same task one period later, beside what noise would give
(docs/analysis.md). A second table has the validation MRR of the gold passage in a pool.
OUTPUT_DIR/table.md has both, OUTPUT_DIR/analysis all else. Run again, finished trainings are read,
an interrupted one resumes at its last checkpoint.
--pretrained DIR starts from a BERT in Hugging Face's layout, of whose vocabulary the store must be.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from small_bert import small_bert

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.plans import MultitaskTraining, TrainingConfig
from taser_jax.assembly.validator import PoolConfig, ValidationConfig
from taser_jax.commands.analyze import AnalysisConfig, analyze
from taser_jax.commands.train import train
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives, PositiveChoice
from taser_jax.data.token_store.store import TokenStore
from taser_jax.evaluation.specialty_report import commitment_table
from taser_jax.interop.pretrained import Pretrained, pretrained_bert
from taser_jax.models.batch import Normalization
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.optim.median import MedianOver
from taser_jax.optim.multitask import Combiner, MultitaskConfig
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.optim.tsage import TSageConfig
from taser_jax.training.checkpoints import CheckpointConfig
from taser_jax.training.loop import LoopConfig
from taser_jax.training.objective import ObjectiveConfig


def model_config(options: argparse.Namespace, store: TokenStore) -> DualEncoderConfig:
    """A small encoder, or the first blocks of a pretrained one."""
    if options.pretrained:
        bert = pretrained_bert(
            source=options.pretrained,
            num_layers=options.layers,
            numerics=BertConfig(dropout_rate=0.0, attention_dropout_rate=0.0),
        )
        return DualEncoderConfig(bert=bert, pooling=Pooling.MEAN, normalization=Normalization.L2)
    bert = small_bert(store, layers=options.layers, embed_dim=options.embed_dim)
    return DualEncoderConfig(bert=bert, pooling=Pooling.MEAN)


def training_config(options: argparse.Namespace, beta: float) -> TrainingConfig:
    """All but β is the same in every training."""
    tsage = TSageConfig(
        beta=beta,
        temperature=options.tsage_temperature,
        burn_in_share=options.burn_in_share,
        median_over=MedianOver.NONZERO,
    )
    return TrainingConfig(
        loop=LoopConfig(
            train_steps=options.steps, checkpoint_period=options.period, checkpoint_minutes=0.0
        ),
        batching=BatchingConfig(batch_size=options.batch_size),
        optimizer=OptimizerConfig(
            learning_rate=options.learning_rate, warmup_steps=options.steps // 10
        ),
        objective=ObjectiveConfig(temperature=0.05 if options.pretrained else 1.0),
        # Every checkpoint is compared with the one before.
        checkpoints=CheckpointConfig(keep_latest=options.steps),
        validation=ValidationConfig(
            num_batches=1,
            num_negatives=0,
            pool=PoolConfig(max_queries=100, hard_negatives=0, other_negatives=10),
        ),
        pretrained=(
            Pretrained(options.pretrained, num_layers=options.layers)
            if options.pretrained
            else None
        ),
        multitask=MultitaskTraining(
            batching=batching_config(options),
            combiner=MultitaskConfig(Combiner.TSAGE, tsage=tsage),
        ),
        seed=options.seed,
    )


def batching_config(options: argparse.Namespace) -> TaskBatchingConfig:
    """Of trainings and of the analysis."""
    return TaskBatchingConfig(
        total=options.batch_size,
        num_negatives=int(bool(options.negatives_dir)),
        # As in TACO-DR's code.
        false_negatives=FalseNegatives.KEEP,
        positives=PositiveChoice.FIRST,
        seed=options.seed,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--token_store", required=True)
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--negatives_dir", help="from `taser mine`; without it, in-batch only")
    parser.add_argument("--pretrained")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.6, 0.9, 0.99])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--period", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=96, help="queries of all tasks")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--tsage_temperature", type=float, default=2.0)
    parser.add_argument("--burn_in_share", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--embed_dim", type=int, default=64)
    parser.add_argument("--num_batches", type=int, default=8, help="measured at each checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    store = TokenStore.open(options.token_store)
    negatives_dirs = [options.negatives_dir] if options.negatives_dir else []
    directories, mrr = {}, {}
    for beta in options.betas:
        name = f"β = {beta:g}"
        directories[name] = str(options.output_dir / f"beta-{beta:g}" / "model")
        summary = train(
            model_dir=directories[name],
            data=TrainingData(options.token_store, negatives_dirs=negatives_dirs),
            model=model_config(options, store),
            training=training_config(options, beta),
        )
        assert summary is not None
        mrr[name] = summary.validation["mrr"]
    findings = analyze(
        model_dirs=directories,
        token_store=options.token_store,
        output_dir=str(options.output_dir / "analysis"),
        negatives_dirs=negatives_dirs,
        config=AnalysisConfig(
            num_batches=options.num_batches,
            temperature=options.tsage_temperature,
            median_over=MedianOver.NONZERO,
        ),
        batching=batching_config(options),
        objective=ObjectiveConfig(temperature=0.05 if options.pretrained else 1.0),
    )
    text = "\n".join(
        [
            commitment_table(findings.commitments),
            "",
            "| | " + " | ".join(mrr) + " |",
            "| --- |" + " ---: |" * len(mrr),
            "| validation MRR | " + " | ".join(f"{value:.3f}" for value in mrr.values()) + " |",
        ]
    )
    (options.output_dir / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
