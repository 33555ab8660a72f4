"""The encoder of benchmarks that train from random weights."""

from __future__ import annotations

from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.bert import BertConfig


def small_bert(
    store: TokenStore, *, layers: int, embed_dim: int, dtype: str = "float32"
) -> BertConfig:
    """A BERT for a store's texts, with heads of 32 and the store's vocabulary."""
    return BertConfig(
        vocab_size=1,
        embed_dim=embed_dim,
        num_layers=layers,
        num_heads=embed_dim // 32,
        head_dim=32,
        mlp_dim=4 * embed_dim,
        max_length=max(store.metadata.query_length, store.metadata.passage_length),
        dtype=dtype,
    )
