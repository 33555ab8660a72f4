r"""Encoding passages of mixed length: our pipeline beside sentence-transformers.

    python benchmarks/encode.py --preset cpu      # MiniLM's size, 2,000 passages
    python benchmarks/encode.py --preset gpu      # BERT-base, 100,000 passages, bfloat16

Needs jax, flax, numpy, and torch, transformers and sentence-transformers for the other side
(`--sides ours` does without). Both sides get tokens, with the same random weights, mean pooling and
embeddings of length one. Ours is `taser encode`'s way: buckets by length, batches of equal numbers
of tokens. Theirs is `SentenceTransformer.encode`: sorted by length, batches of `--torch_batch_size`
texts padded to the longest, scaled-dot-product attention, and `torch.compile` with dynamic shapes
in the gpu preset or with `--torch_compile`. Prints one JSON line a figure:

    agreement     largest difference of a number of the embeddings; the sides compute the same
    matmul peak   FLOPs per second of a large product in the encoder's precision
    <side>        medians over rounds in which the sides take turns, least, median and most of the
                  rounds' ratios to theirs, tokens per second, the share of
                  computed positions that hold tokens, and seconds of the first pass, in which ours
                  compiles one program per bucket. `mfu` is model FLOPs of the passages per second
                  over the matmul peak, `mfu_padded` the same of the padded batches
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from side_by_side import bert_config, in_turns, machine, matmul_peak, parse_with_presets, show

from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.interop.bert import bert_leaves
from taser_jax.interop.bert_formats import config_to_json
from taser_jax.interop.tensors import params_to_tensors
from taser_jax.models.batch import Normalization, Role, Tokens
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "layers": 6, "embed_dim": 384, "heads": 12, "mlp_dim": 1536, "vocab_size": 30522,
        "passages": 2000, "median_length": 90, "max_length": 256, "dtype": "float32",
        "attention": "einsum", "torch_batch_size": 32, "length_multiple": 8, "repeats": 3,
        "matmul_size": 2048, "torch_compile": False,
    },
    "gpu": {
        "layers": 12, "embed_dim": 768, "heads": 12, "mlp_dim": 3072, "vocab_size": 30522,
        "passages": 100_000, "median_length": 130, "max_length": 256, "dtype": "bfloat16",
        "attention": "cudnn", "torch_batch_size": 256, "length_multiple": 32, "repeats": 3,
        "matmul_size": 8192, "torch_compile": True,
    },
}  # fmt: skip
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Encode = Callable[[], np.ndarray]


@dataclasses.dataclass
class Computed:
    """What one pass of a side computed, padding included.

    Attributes:
        positions: of tokens.
        flops: of the model.
    """

    positions: int = 0
    flops: int = 0

    def add(self, config: DualEncoderConfig, batch_size: int, length: int) -> None:
        """Counts a batch."""
        self.positions += batch_size * length
        self.flops += batch_size * sum(config.block_flops(length))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_tokens", type=int, help="of ours; default: by platform")
    return parse_with_presets(parser, PRESETS)


def make_passages(arguments: argparse.Namespace) -> TokenArray:
    """Lengths are log-normal around the median, as passages cut at a length have them."""
    rng = np.random.default_rng(0)
    lengths = arguments.median_length * rng.lognormal(0, 0.5, arguments.passages)
    lengths = np.clip(lengths, 4, arguments.max_length).astype(np.int32)
    shape = (arguments.passages, arguments.max_length)
    ids = rng.integers(len(_SPECIAL), arguments.vocab_size, shape, dtype=np.int32)
    return TokenArray(ids * (np.arange(arguments.max_length) < lengths[:, None]), lengths)


def model_config(arguments: argparse.Namespace) -> DualEncoderConfig:
    bert = bert_config(arguments)
    return DualEncoderConfig(bert=bert, pooling=Pooling.MEAN, normalization=Normalization.L2)


def our_side(
    arguments: argparse.Namespace, params: Any, passages: TokenArray, computed: Computed
) -> Encode:
    """What `taser encode` does with passages, the writing of their shards included."""
    config = model_config(arguments)
    model = DualEncoder(config)

    @jax.jit
    def embed(params: Any, tokens: Tokens) -> jax.Array:
        encoded: Any = model.apply({"params": params}, tokens, role=Role.PASSAGE, method="encode")
        return encoded.embeddings

    def encode_fn(tokens: Tokens) -> jax.Array:
        computed.add(config, *tokens.ids.shape)
        return embed(params, tokens)

    how = EncodeConfig(
        batch_tokens=arguments.batch_tokens, length_multiple=arguments.length_multiple
    )

    def encode() -> np.ndarray:
        with tempfile.TemporaryDirectory() as directory:
            encode_texts(encode_fn, passages, directory, fingerprints={}, config=how)
            return np.array(Embeddings(directory)[:])

    return encode


def torch_side(
    arguments: argparse.Namespace, params: Any, passages: TokenArray, computed: Computed
) -> Encode:
    """`SentenceTransformer.encode` with these weights, its tokenizer stepped over."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    config = model_config(arguments)
    bert = transformers.BertModel(
        transformers.BertConfig.from_dict(config_to_json(config.bert)), add_pooling_layer=False
    )
    tensors = params_to_tensors(params["encoder"], bert_leaves(config.bert))
    bert.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        vocabulary = pathlib.Path(folder) / "vocab.txt"
        vocabulary.write_text("\n".join(_SPECIAL), encoding="utf-8")
        transformers.BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
        transformer = Transformer(folder, model_kwargs={"attn_implementation": "sdpa"})
        modules = [transformer, Pooling(config.bert.embed_dim), Normalize()]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = SentenceTransformer(modules=modules, device=device)
    if arguments.dtype == "bfloat16":
        model.bfloat16()
    if arguments.torch_compile:
        # Each batch has its own length, which would be a program of its own.
        model.compile(dynamic=True)

    # A text holds one character a token: sentence-transformers sorts by the length of texts.
    lengths = passages.lengths
    texts = [
        "".join(map(chr, row[:length]))
        for row, length in zip(passages.ids.tolist(), lengths.tolist(), strict=True)
    ]

    def preprocess(batch: list[str], **_: Any) -> dict[str, Any]:
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(list(map(ord, text))) for text in batch], batch_first=True
        )
        sizes = torch.tensor([len(text) for text in batch])
        computed.add(config, *ids.shape)
        mask = (torch.arange(ids.shape[1])[None] < sizes[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask}

    model.preprocess = preprocess

    def encode() -> np.ndarray:
        embeddings = model.encode(
            texts, batch_size=arguments.torch_batch_size, convert_to_tensor=True
        )
        return embeddings.float().cpu().numpy()

    return encode


def main() -> None:
    arguments = parse()
    passages = make_passages(arguments)
    model = DualEncoder(model_config(arguments))
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    torch_packages = ("torch", "transformers", "sentence-transformers")
    packages = ("flax", *(torch_packages if "torch" in arguments.sides else ()))
    about = {"benchmark": "encode", "preset": arguments.preset}
    about |= {name: getattr(arguments, name) for name in PRESETS["cpu"]} | machine(*packages)

    makers = {"torch": torch_side, "ours": our_side}
    calls: dict[str, Encode] = {}
    embeddings, first, computed = {}, {}, {}
    for name in sorted(arguments.sides, reverse=True):
        counted = Computed()
        calls[name] = makers[name](arguments, params, passages, counted)
        began = time.perf_counter()
        embeddings[name] = calls[name]()
        first[name] = time.perf_counter() - began
        computed[name] = dataclasses.replace(counted)
    if len(embeddings) == 2:
        difference = float(np.abs(embeddings["ours"] - embeddings["torch"]).max())
        show(about | {"figure": "agreement", "largest_difference": difference})

    peak = matmul_peak(arguments.matmul_size, arguments.dtype)
    show(about | {"figure": "matmul peak", "gigaflops": peak / 1e9})
    times = in_turns(calls, repeats=arguments.repeats)
    tokens = int(passages.lengths.sum())
    real = Computed()
    for length, count in zip(*np.unique(passages.lengths, return_counts=True), strict=True):
        real.add(model_config(arguments), int(count), int(length))
    for name in calls:
        timing = times[name].figures(times.get("torch"))
        seconds = timing["milliseconds"] / 1e3
        figure = {
            **timing,
            "tokens_per_second": tokens / seconds,
            "tokens_per_cpu_second": 1e3 * tokens / timing["cpu_milliseconds"],
            "mfu": real.flops / seconds / peak,
            "mfu_padded": computed[name].flops / seconds / peak,
            "real_share_of_positions": tokens / computed[name].positions,
            "first_pass_seconds": first[name],
        }
        show(about | {"figure": name} | figure)


if __name__ == "__main__":
    main()
