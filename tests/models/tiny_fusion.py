"""Small models that fuse documents, and queries with documents for them."""

import numpy as np
from tiny_bert import tiny_bert, tiny_tokens
from tiny_t5 import one_block, tiny_t5

from taser_jax.models.batch import Augmented, Tokens
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.fusion import BertFusionConfig, T5FusionConfig


def t5_fusion(*, t5=None, **changes):
    return DualEncoder(T5FusionConfig(t5=t5 or tiny_t5(), **changes))


def small_t5_fusion(**changes):
    """One block of each stack, which compiles in half the time."""
    return t5_fusion(t5=one_block(), **changes)


def bert_fusion(**changes):
    return DualEncoder(BertFusionConfig(bert=tiny_bert(num_layers=1), **changes))


def augmented(batch=3, documents=2, length=7, seed=1):
    """Queries with documents of different lengths; the last query's last document is absent."""
    found = tiny_tokens(batch * documents, length, seed=seed + 1)
    shape = (batch, documents, length)
    present = np.ones((batch, documents), bool)
    present[-1, -1:] = False
    return Augmented(
        tiny_tokens(batch, seed=seed),
        Tokens(found.ids.reshape(shape), found.mask.reshape(shape)),
        present,
    )
