"""Scores of a cross-encoder from Hugging Face: query and passage read together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.progress import bar

_BATCH = 32


class CrossEncoder:
    """A sequence classifier with one output, such as `cross-encoder/ms-marco-MiniLM-L6-v2`.

    Args:
        directory: directory of a local checkpoint with its tokeniser; nothing is downloaded.
        max_length: maximum tokens of query and passage together; longer passages are truncated.

    Raises:
        ConfigError: PyTorch and transformers are not installed, or the classifier has several
            outputs.
    """

    def __init__(self, directory: FilePath, *, max_length: int = 512) -> None:
        try:
            import transformers
        except ImportError as error:
            problem, fix = "a cross-encoder needs PyTorch and transformers", how_to_install("torch")
            raise ConfigError(problem, where=str(directory), fix=fix) from error
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True
        )
        self._model = transformers.AutoModelForSequenceClassification.from_pretrained(
            str(directory), local_files_only=True
        ).eval()
        outputs = self._model.config.num_labels
        if outputs != 1:
            problem = f"a classifier with {outputs} outputs, not one for the relevance"
            fix = "give a cross-encoder that was trained to rank"
            raise ConfigError(problem, where=str(directory), fix=fix)
        self._max_length = max_length

    def scores(self, queries: Sequence[str], passages: Sequence[str]) -> Float64[np.ndarray, " p"]:
        """The classifier's output for each pair, before any activation.

        Args:
            queries: one for each pair.
            passages: title and text, parallel to the queries.
        """
        import torch

        scores = np.empty(len(queries))
        # Pairs of one length make batches with little padding; the longest come first.
        lengths = [len(query) + len(text) for query, text in zip(queries, passages, strict=True)]
        order = np.argsort(lengths, kind="stable")[::-1]
        with (
            bar("cross-encoder", total=len(order), unit="pair") as progress,
            torch.inference_mode(),
        ):
            for start in range(0, len(order), _BATCH):
                places = order[start : start + _BATCH]
                inputs = self._tokenizer(
                    [queries[place] for place in places],
                    [passages[place] for place in places],
                    padding=True,
                    truncation="only_second",
                    max_length=self._max_length,
                    return_tensors="pt",
                )
                scores[places] = self._model(**inputs).logits[:, 0].float().numpy()
                progress.update(len(places))
        return scores
