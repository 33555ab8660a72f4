"""The comparison of open_qa.gin at a larger size, on a machine with an accelerator.

    python benchmarks/open_qa/device.py --token_store DIR --negatives_dir DIR --output_dir DIR \
        [--systems DPR Shared "TASER Det-R" "TASER Seq-R" "TASER Tok-R"] [--steps 1200 ...]

Takes the token store and BM25's negatives that benchmarks/open_qa/run.sh made elsewhere, and needs
no TensorFlow, SeqIO or ScaNN. Each system is trained on BM25's negatives, mined for with exact
search, trained again from scratch, and searched with. OUTPUT_DIR gets, for each system, one .npz
of the top 100 of validation and test queries of both rounds, and a line a round in device.jsonl;
benchmarks/open_qa/score_device.py makes a table of them. A system whose .npz is there is done.

`--probe` only trains `--systems` for one round with each of `--learning_rate` and prints validation
metrics.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import selected_checkpoint
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.assembly.validator import PoolConfig, ValidationConfig
from taser_jax.commands.encode import encode
from taser_jax.commands.train import TrainSummary, train
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives, PositiveChoice
from taser_jax.data.token_store.negatives import write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.retrieval.exact import ExactSearcher, Searcher
from taser_jax.retrieval.mining import MiningConfig, mine_negatives
from taser_jax.retrieval.runs import SearchResult
from taser_jax.training.checkpoints import CheckpointConfig, Selection
from taser_jax.training.loop import LoopConfig
from taser_jax.training.losses import RoutingRegularizer
from taser_jax.training.objective import ObjectiveConfig

SYSTEMS = ("DPR", "Shared", "TASER Det-R", "TASER Seq-R", "TASER Tok-R")
ROUTINGS = {
    "TASER Det-R": Routing.DETERMINISTIC,
    "TASER Seq-R": Routing.SEQUENCE,
    "TASER Tok-R": Routing.TOKEN,
}
SEARCHED = ("validation", "test")


def model_config(system: str, options: argparse.Namespace) -> DualEncoderConfig:
    """The dual encoder of a row of the table."""
    bert = BertConfig(
        vocab_size=1,
        embed_dim=options.embed_dim,
        num_layers=options.layers,
        num_heads=options.embed_dim // options.head_dim,
        head_dim=options.head_dim,
        mlp_dim=4 * options.embed_dim,
        max_length=512,
        dropout_rate=options.dropout,
        attention_dropout_rate=options.dropout,
        dtype=options.dtype,
    )
    routing = ROUTINGS.get(system)
    return DualEncoderConfig(
        bert=bert,
        experts=ExpertConfig() if routing is None else ExpertConfig(num_experts=2, routing=routing),
        towers=Towers.SEPARATE if system == "DPR" else Towers.TIED,
        pooling=Pooling(options.pooling),
    )


def training_config(
    system: str, options: argparse.Namespace, *, learning_rate: float
) -> TrainingConfig:
    """How a row is trained, in each round alike."""
    learned = ROUTINGS.get(system, Routing.DETERMINISTIC) is not Routing.DETERMINISTIC
    return TrainingConfig(
        loop=LoopConfig(
            train_steps=options.steps,
            evaluation_period=max(1, options.steps // options.validations),
        ),
        # The published table was made with these.
        batching=BatchingConfig(
            batch_size=options.batch_size,
            num_negatives=1,
            false_negatives=FalseNegatives.KEEP,
            positives=PositiveChoice.FIRST,
        ),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate, warmup_steps=max(1, options.steps // 10)
        ),
        objective=ObjectiveConfig(regularizer=RoutingRegularizer() if learned else None),
        checkpoints=CheckpointConfig(selection=Selection.MRR),
        validation=ValidationConfig(
            num_batches=4, num_negatives=0, pool=PoolConfig(other_negatives=options.pool)
        ),
    )


class Bench:
    """The stages of every system, over one token store.

    Args:
        options: the command line.
        work_dir: checkpoints and embeddings go there and are not kept.
    """

    def __init__(self, options: argparse.Namespace, work_dir: pathlib.Path) -> None:
        self._options, self._work = options, work_dir
        self._store = TokenStore.open(options.token_store)

    def train(
        self, system: str, *, label: str, negatives_dir: str, learning_rate: float
    ) -> TrainSummary:
        """One training from scratch."""
        summary = train(
            model_dir=str(self._work / label),
            data=TrainingData(self._options.token_store, negatives_dirs=[negatives_dir]),
            model=model_config(system, self._options),
            training=training_config(system, self._options, learning_rate=learning_rate),
        )
        assert summary is not None
        return summary

    def run(self, system: str) -> None:
        """Both rounds of a system; writes its .npz and its lines of device.jsonl."""
        label = system.lower().replace(" ", "-")
        path = self._options.output_dir / f"{label}.npz"
        if path.exists():
            return
        arrays: dict[str, Any] = {}
        lines = []
        negatives = self._options.negatives_dir
        for number in (1, 2):
            name = f"{label}-{number}"
            start = time.monotonic()
            summary = self.train(
                system,
                label=name,
                negatives_dir=negatives,
                learning_rate=self._options.learning_rate[0],
            )
            trained = time.monotonic()
            embeddings, searcher = self._encode(name)
            encoded = time.monotonic()
            for split in SEARCHED:
                for task, result in self._search(embeddings, searcher, split).items():
                    arrays[f"{number}/{task}/{split}/rows"] = result.rows
                    arrays[f"{number}/{task}/{split}/scores"] = result.scores
            if number == 1:
                negatives = self._mine(embeddings, searcher, name)
            lines.append(
                {
                    "system": system,
                    "round": number,
                    "parameters": summary.parameters,
                    "validation": dict(summary.validation),
                    "best_step": int(
                        selected_checkpoint(self._work / name).name.rpartition("_")[2]
                    ),
                    "steps_per_second": round(summary.steps_per_second, 3),
                    "training_seconds": round(trained - start, 1),
                    "encoding_seconds": round(encoded - trained, 1),
                    "searching_seconds": round(time.monotonic() - encoded, 1),
                    **self._described(),
                }
            )
        scratch = path.with_suffix(".tmp.npz")
        np.savez_compressed(scratch, **arrays)
        scratch.rename(path)
        self._append(lines)

    def probe(self, system: str) -> None:
        """One round with each learning rate, validated only."""
        for number, learning_rate in enumerate(self._options.learning_rate):
            summary = self.train(
                system,
                label=f"probe-{system.lower().replace(' ', '-')}-{number}",
                negatives_dir=self._options.negatives_dir,
                learning_rate=learning_rate,
            )
            line = {
                "probe": system,
                "learning_rate": learning_rate,
                "validation": dict(summary.validation),
                "steps_per_second": round(summary.steps_per_second, 3),
                **self._described(),
            }
            print(json.dumps(line), flush=True)
            self._append([line])

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with (self._options.output_dir / "device.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _described(self) -> dict[str, Any]:
        left_out = ("token_store", "negatives_dir", "output_dir", "systems", "probe")
        settings = {k: v for k, v in vars(self._options).items() if k not in left_out}
        return {
            "settings": settings,
            "token_store": self._store.metadata.fingerprint,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }

    def _encode(self, name: str) -> tuple[pathlib.Path, Searcher]:
        """Encodes with the best checkpoint; the embeddings' directory, and a search in them."""
        directory = self._work / f"{name}-embeddings"
        encode(
            model_dir=str(self._work / name),
            token_store=self._options.token_store,
            output_dir=str(directory),
            config=EncodeConfig(batch_tokens=self._options.batch_tokens),
        )
        return directory, ExactSearcher(Embeddings(directory))

    def _search(
        self, embeddings: pathlib.Path, searcher: Searcher, split: str
    ) -> dict[str, SearchResult]:
        results = {}
        for task, splits in self._store.tasks.items():
            if split in splits:
                queries = QueryEmbeddings.of_split(embeddings, task, split)
                results[task] = searcher.search(queries[:], self._options.k)
        return results

    def _mine(self, embeddings: pathlib.Path, searcher: Searcher, name: str) -> str:
        """P2: the model's top passages but the positives, answer-containing ones kept."""
        directory = self._work / f"{name}-negatives"
        for task, result in self._search(embeddings, searcher, "train").items():
            queries = self._store.queries(task, "train")
            mined = mine_negatives(
                result, queries.positives, config=MiningConfig(depth=self._options.k)
            )
            write_negatives(
                directory,
                task,
                "train",
                query_ids=queries.query_ids,
                rows=mined.rows,
                scores=mined.scores,
                metadata={
                    "collection_fingerprint": self._store.metadata.collection_fingerprint,
                    "source": name,
                },
            )
        return str(directory)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--token_store", required=True)
    parser.add_argument("--negatives_dir", required=True)
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--learning_rate", type=float, nargs="+", default=[5e-4])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--embed_dim", type=int, default=384)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--pooling", choices=("cls", "mean"), default="mean")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--validations", type=int, default=6, help="checkpoints to choose from")
    parser.add_argument("--pool", type=int, default=30, help="random passages a question")
    parser.add_argument("--batch_tokens", type=int, default=262144, help="of an encoded batch")
    parser.add_argument("--k", type=int, default=100)
    options = parser.parse_args(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work_dir:
        bench = Bench(options, pathlib.Path(work_dir))
        for system in options.systems:
            (bench.probe if options.probe else bench.run)(system)


if __name__ == "__main__":
    main()
