"""SentencePiece models: with T5's special pieces (no start), and with BERT's."""

import io
import os
from collections.abc import Sequence

import sentencepiece

from taser_jax.data.text.vocabularies import SentencePieceVocabulary


def t5_model(texts: Sequence[str], size: int, **settings: object) -> bytes:
    return _model(texts, size, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **settings)


def save_bert_pieces(directory: str | os.PathLike[str], texts: Sequence[str], size: int) -> None:
    """A saved vocabulary whose special pieces are [PAD], [UNK], [CLS], [SEP] and [MASK]."""
    ids = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
    names = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]"}
    pieces = {f"{name}_piece": piece for name, piece in names.items()}
    model = _model(texts, size, control_symbols=["[MASK]"], **ids, **pieces)
    SentencePieceVocabulary(model).save(directory)


def _model(texts: Sequence[str], size: int, **settings: object) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()
