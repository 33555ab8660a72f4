"""A SentencePiece model with T5's special pieces: pad, end and unknown, and no start."""

from __future__ import annotations

import io
from collections.abc import Sequence

import sentencepiece


def t5_model(texts: Sequence[str], size: int, **settings: object) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=size,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()
