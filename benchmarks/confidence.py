r"""What confidence adds to encoding queries and searching them: 20 members over lists of 1,000.

    python benchmarks/confidence.py --dim 384 --layers 6
    python benchmarks/confidence.py --dim 768 --layers 12

Needs jax, flax and numpy. A BERT of random weights encodes queries of 32 tokens; passages are
random vectors, searched exactly. Parts take turns. Prints one JSON line per figure: `encode`,
`search` and `confidence`, milliseconds per query (median), and for the last its share of the two
others together and the bytes by which the process grew.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from side_by_side import PeakResident, in_turns, machine, show  # isort: skip  # before JAX computes

import jax
import numpy as np

from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params
from taser_jax.retrieval.exact import ExactSearcher
from taser_jax.systems.muf.confidence import query_confidence
from taser_jax.systems.muf.members import EnsembleConfig, apply_members, init_members


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--k", type=int, default=1000)
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--vocab_size", type=int, default=30522)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def encoder(arguments: argparse.Namespace) -> Callable[[], np.ndarray]:
    """Encodes all queries, as `taser encode` does a batch."""
    bert = BertConfig(
        vocab_size=arguments.vocab_size,
        embed_dim=arguments.dim,
        num_layers=arguments.layers,
        num_heads=max(1, arguments.dim // 32),
        head_dim=min(32, arguments.dim),
        mlp_dim=4 * arguments.dim,
        max_length=arguments.length,
    )
    model = DualEncoder(DualEncoderConfig(bert=bert))
    params = init_params(model, jax.random.key(0))
    shape = (arguments.queries, arguments.length)
    ids = np.random.default_rng(0).integers(5, arguments.vocab_size, shape).astype(np.int32)
    tokens = Tokens(ids=ids, mask=np.ones(shape, bool))

    @jax.jit
    def encode(params: object, tokens: Tokens) -> jax.Array:
        return model.apply({"params": params}, tokens, role=Role.QUERY, method="encode").embeddings

    return lambda: np.asarray(encode(params, tokens))


def main() -> None:
    arguments = parse()
    rng = np.random.default_rng(1)
    encode = encoder(arguments)
    passages = rng.normal(size=(arguments.passages, arguments.dim)).astype(np.float32)
    searcher = ExactSearcher(passages)
    config = EnsembleConfig(arguments.members, (arguments.hidden, arguments.hidden))
    members = init_members(
        jax.random.key(1), dim=arguments.dim, config=config, members=arguments.members
    )
    queries = encode()
    result = searcher.search(queries, arguments.k)

    def confidence() -> np.ndarray:
        return query_confidence(
            lambda block: apply_members(members, block),
            queries,
            passages.__getitem__,
            result,
            temperatures=(1e-3,),
            k=arguments.k,
        )

    with PeakResident() as peak:
        confidence()
    calls: dict[str, Callable[[], object]] = {
        "encode": encode,
        "search": lambda: searcher.search(queries, arguments.k),
        "confidence": confidence,
    }
    times = in_turns(calls, repeats=arguments.repeats, uncounted=1)
    medians = {name: call_times.figures(None)["milliseconds"] for name, call_times in times.items()}
    common = {name: getattr(arguments, name) for name in ("dim", "layers", "passages", "k")}
    for name, milliseconds in medians.items():
        figure = {"figure": name, **common, "members": arguments.members}
        figure["milliseconds_per_query"] = milliseconds / arguments.queries
        if name == "confidence":
            figure["share_of_the_others"] = milliseconds / (medians["encode"] + medians["search"])
            figure["bytes"] = peak.bytes
        show({**figure, **machine()})


if __name__ == "__main__":
    main()
