"""What keeps learned routing from using one expert only?

    python benchmarks/routing_collapse.py --token_store DIR --output_dir DIR [--negatives_dir DIR]

trains one small TASER per setting, on the token store's train queries, and prints one JSON line
each: expert shares of validation queries and of their gold passages (argmax, as at inference) in
every specialised block, offset and spread of the router's logits before and after training, the
mutual information of role and expert, and the validation MRR of the gold passage in a pool. A table
follows. A setting is what the router reads,

    cls        Seq-R, the state of [CLS] (the paper's)
    mean       Seq-R, the mean of the tokens' states
    token      Tok-R, each token's state

and a regulariser with its weight, as in `cls/none` or `mean/information_up:1`:

    none               no regulariser
    per_input_up       per-input entropy raised: what the paper says it is for
    per_input_down     per-input entropy lowered: the paper's formula read to the letter
    batch_marginal_up  entropy of each role's mean choice raised
    information_up     mutual information of input and expert raised

A block counts as collapsed where one expert gets 95% or more of both roles' inputs, roles weighing
the same. A setting that is done in OUTPUT_DIR is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import LoadedModel, load_model
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.assembly.validator import PoolConfig, ValidationConfig
from taser_jax.commands.train import train
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives, PositiveChoice
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Role, RoutingStatistics
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import (
    ExpertConfig,
    GateGradient,
    Routing,
    SequenceSummary,
    entropy,
    expert_shares,
    logit_offset,
    logit_spread,
)
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.storage.progress import track
from taser_jax.training.loop import LoopConfig
from taser_jax.training.losses import RoutingMeasure, RoutingRegularizer
from taser_jax.training.objective import ObjectiveConfig
from taser_jax.training.state import Params, named_key

COLLAPSED = 0.95
REGULARIZERS = {
    "per_input_up": (RoutingMeasure.PER_INPUT, 1),
    "per_input_down": (RoutingMeasure.PER_INPUT, -1),
    "batch_marginal_up": (RoutingMeasure.BATCH_MARGINAL, 1),
    "information_up": (RoutingMeasure.INFORMATION, 1),
}
READINGS = {
    "cls": (Routing.SEQUENCE, SequenceSummary.CLS),
    "mean": (Routing.SEQUENCE, SequenceSummary.MEAN),
    "token": (Routing.TOKEN, SequenceSummary.CLS),
}
SETTINGS = (
    "cls/none",
    "cls/per_input_up:0.01",
    "cls/per_input_up:1",
    "cls/information_up:1",
    "mean/none",
    "mean/information_up:1",
    "token/none",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        reads: a key of `READINGS`.
        regularizer: a key of `REGULARIZERS`.
        weight: β; 0 for none.
        seed: of weights, dropout, routing noise and batches.
    """

    reads: str
    regularizer: str
    weight: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.reads}-{self.regularizer}-{self.weight:g}-seed{self.seed}"

    @property
    def objective(self) -> ObjectiveConfig:
        """The contrastive loss with this regulariser."""
        if self.regularizer == "none":
            return ObjectiveConfig()
        kind, sign = REGULARIZERS[self.regularizer]
        return ObjectiveConfig(regularizer=RoutingRegularizer(kind, sign * self.weight))


def role_information(
    queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, " blocks"]:
    """I(role; expert) in nats, from argmax choices, both roles weighing the same.

    H(p) − ½(H(p_query) + H(p_passage)) with p = ½(p_query + p_passage): 0 where both roles use
    the experts alike, ln 2 where they never meet (as Det-R does). Weighing roles equally keeps it
    independent of how many passages (or tokens) there are for a query.

    Example:
        Queries go 3 : 1, passages 1 : 3, so p = (½, ½) and the information is
        ln 2 − H(¾, ¼) = 0.6931 − 0.5623 = 0.1308 nats.

    Args:
        queries: sums over queries.
        passages: sums over passages.

    Returns:
        One value per specialised block, 0 to 0.6931.
    """
    query, passage = expert_shares(queries), expert_shares(passages)
    return entropy((query + passage) / 2) - (entropy(query) + entropy(passage)) / 2


def cases(settings: Sequence[str], seeds: Sequence[int]) -> Iterator[Case]:
    """Every setting, such as `mean/information_up:1`, with every seed."""
    for seed in seeds:
        for setting in settings:
            reads, _, regularizer = setting.partition("/")
            name, _, weight = regularizer.partition(":")
            yield Case(reads, name, float(weight or 0), seed)


def routing_of(
    model: LoadedModel, params: Params, store: TokenStore, *, split: str
) -> dict[Role, Any]:
    """Inference statistics of a split's queries and of their gold passages, all tasks together."""
    texts: dict[Role, list[Any]] = {Role.QUERY: [], Role.PASSAGE: []}
    for task, splits in store.tasks.items():
        if split not in splits:
            continue
        queries = store.queries(task, split)
        gold = [int(queries.positives[i][0]) for i in range(len(queries))]
        texts[Role.QUERY] += _blocks(queries.tokens, np.arange(len(queries)))
        texts[Role.PASSAGE] += _blocks(store.passages.tokens, np.unique(gold))

    def statistics(role: Role) -> RoutingStatistics:
        @jax.jit
        def apply(params: Any, tokens: Any) -> RoutingStatistics:
            encoded: Any = model.model.apply(
                {"params": params}, tokens, role=role, train=False, method="encode"
            )
            return encoded.routing

        parts = [apply(params, tokens) for tokens in texts[role]]
        return jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *parts)

    return {role: statistics(role) for role in texts}


def _blocks(tokens_of: Any, rows: np.ndarray, size: int = 128) -> list[Any]:
    return [tokens_of(rows[start : start + size]) for start in range(0, len(rows), size)]


def report(
    case: Case,
    statistics: Mapping[Role, Any],
    validation: Mapping[str, float],
    *,
    initial: Mapping[Role, Any],
) -> dict:
    """What one training came to, JSON-able.

    Args:
        case: the training.
        statistics: of queries and passages, at inference.
        validation: metrics after the last step.
        initial: statistics before training.
    """
    sides = [statistics[role] for role in (Role.QUERY, Role.PASSAGE)]
    # In float64, where three digits are written as three.
    query, passage = (np.asarray(expert_shares(side), np.float64) for side in sides)
    information = np.asarray(role_information(*sides), np.float64)
    largest = ((query + passage) / 2).max(-1)
    entropy = [
        np.asarray(side.entropy_sum, np.float64) / np.asarray(side.count)
        for side in statistics.values()
    ]
    return {
        "benchmark": "routing_collapse",
        "reads": case.reads,
        "regularizer": case.regularizer,
        "weight": case.weight,
        "seed": case.seed,
        "query_shares": np.round(query, 3).tolist(),
        "passage_shares": np.round(passage, 3).tolist(),
        "largest_share": np.round(largest, 3).tolist(),
        "collapsed_blocks": int((largest >= COLLAPSED).sum()),
        "blocks": len(largest),
        "mutual_information": np.round(information, 3).tolist(),
        **{f"initial_{name}": values for name, values in _logits(initial).items()},
        **_logits(statistics),
        "per_input_entropy": np.round(np.mean(entropy, axis=0), 3).tolist(),
        "validation_mrr": round(float(validation["mrr"]), 4),
    }


def _logits(statistics: Mapping[Role, Any]) -> dict[str, list[float]]:
    """Offset and spread by block, over queries and gold passages."""
    both = statistics[Role.QUERY] + statistics[Role.PASSAGE]
    by_block = {"logit_offset": logit_offset(both), "logit_spread": logit_spread(both)}
    return {
        name: np.round(np.asarray(values, np.float64), 4).tolist()
        for name, values in by_block.items()
    }


def run(case: Case, store: TokenStore, options: argparse.Namespace) -> dict:
    """Trains and measures one case, or returns what was measured before."""
    root = options.output_dir / case.name
    result = root / "result.json"
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    bert = BertConfig(
        vocab_size=1,
        embed_dim=options.embed_dim,
        num_layers=options.layers,
        num_heads=options.embed_dim // 32,
        head_dim=32,
        mlp_dim=4 * options.embed_dim,
        max_length=max(store.metadata.query_length, store.metadata.passage_length),
        dtype=options.dtype,
    )
    routing, summary = READINGS[case.reads]
    experts = ExpertConfig(
        num_experts=options.experts,
        shared_per_specialized=options.shared_per_specialized,
        routing=routing,
        sequence_summary=summary,
        gate_gradient=GateGradient(options.gate_gradient),
    )
    # One checkpoint, the last: routing is shown as training left it, not where MRR was best.
    training = TrainingConfig(
        loop=LoopConfig(train_steps=options.steps, checkpoint_minutes=0.0),
        batching=BatchingConfig(
            batch_size=options.batch_size,
            num_negatives=int(bool(options.negatives_dir)),
            # The published table was made with these.
            false_negatives=FalseNegatives.KEEP,
            positives=PositiveChoice.FIRST,
            seed=case.seed,
        ),
        optimizer=OptimizerConfig(
            learning_rate=options.learning_rate, warmup_steps=options.steps // 10
        ),
        objective=case.objective,
        validation=ValidationConfig(
            num_batches=1,
            num_negatives=0,
            pool=PoolConfig(max_queries=300, hard_negatives=0, other_negatives=10),
        ),
        seed=case.seed,
    )
    result_of_training = train(
        model_dir=str(root / "model"),
        data=TrainingData(
            str(store.directory),
            negatives_dirs=[options.negatives_dir] if options.negatives_dir else [],
        ),
        model=DualEncoderConfig(bert=bert, experts=experts, pooling=Pooling.MEAN),
        training=training,
    )
    assert result_of_training is not None
    model = load_model(root / "model")
    # As `train` draws them.
    untrained = init_params(model.model, named_key(case.seed, "init"))
    record = report(
        case,
        routing_of(model, model.params, store, split="validation"),
        result_of_training.validation,
        initial=routing_of(model, untrained, store, split="validation"),
    ) | {
        "steps": options.steps,
        "gate_gradient": options.gate_gradient,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    result.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return record


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, one line per setting; smallest and largest figure over seeds and blocks."""
    lines = [
        "| router reads | regulariser | β | seeds | collapsed blocks | larger expert's share "
        "| logits' offset / spread at the start | after training | role information (max .693) "
        "| validation MRR |",
        "| --- | --- | ---: | ---: | --- | --- | --- | --- | --- | --- |",
    ]
    settings: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for record in results:
        key = (record["reads"], record["regularizer"], record["weight"])
        settings.setdefault(key, []).append(record)
    for (reads, regularizer, weight), seeds in settings.items():
        collapsed, blocks = (sum(s[name] for s in seeds) for name in ("collapsed_blocks", "blocks"))
        logits = [
            f"{_range(seeds, f'{prefix}logit_offset')} / {_range(seeds, f'{prefix}logit_spread')}"
            for prefix in ("initial_", "")
        ]
        cells = [
            *(reads, regularizer, f"{weight:g}", str(len(seeds)), f"{collapsed} of {blocks}"),
            _range(seeds, "largest_share", digits=2),
            *logits,
            _range(seeds, "mutual_information"),
            _range(seeds, "validation_mrr"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(seeds: Sequence[Mapping[str, Any]], name: str, *, digits: int = 3) -> str:
    values = np.concatenate([np.atleast_1d(record[name]) for record in seeds])
    # Not "-0.000".
    ends = [f"{value + 0.0:.{digits}f}" for value in np.round([values.min(), values.max()], digits)]
    return "–".join(dict.fromkeys(ends))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--token_store", required=True)
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--negatives_dir", help="from `taser mine`; without it, in-batch only")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embed_dim", type=int, default=64)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--shared_per_specialized", type=int, default=1)
    parser.add_argument("--gate_gradient", default="all_experts")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(arguments)
    store = TokenStore.open(options.token_store)
    results = []
    for case in track(list(cases(options.settings, options.seeds)), "routing cases"):
        results.append(run(case, store, options))
        print(json.dumps(results[-1]), flush=True)
    text = table(results)
    (options.output_dir / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
