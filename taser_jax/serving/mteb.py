"""MTEB's interface to our models: `mteb.evaluate(MtebEncoder.load("model"), tasks)`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from taser_jax.retriever import Retriever
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.records import Passage

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models.model_meta import ModelMeta
    from mteb.types import PromptType

_NAME = "taser_jax"


class MtebEncoder:
    """A model directory as an encoder of MTEB; queries and passages are scored by dot product.

    Example:
        >>> import mteb
        >>> task = mteb.get_task("SciFact")
        >>> mteb.evaluate(MtebEncoder.load("model"), task)  # doctest: +SKIP

    Args:
        retriever: the model, with its prompts and lengths.
        name: under which results are filed, "taser_jax/<name>".
    """

    def __init__(self, retriever: Retriever, *, name: str) -> None:
        self._retriever = retriever
        self.mteb_model_meta = _meta(retriever, name)

    @classmethod
    def load(cls, directory: str, *, task: str | None = None) -> MtebEncoder:
        """Opens a model directory.

        Args:
            directory: of `taser train` or `taser import`.
            task: the task whose prompt, length and query encoder are used, where tasks differ.
        """
        return cls(
            Retriever.load(directory, task=task), name=pathlib.Path(directory).resolve().name
        )

    def encode(
        self,
        inputs: Iterable[Mapping[str, Sequence[str]]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **options: object,
    ) -> Float[np.ndarray, "texts dim"]:
        """Embeddings of MTEB's batches.

        Args:
            inputs: batches with "text"; those of passages with "title" and "body", too.
            task_metadata: the task; our prompts are the model's own, not the task's.
            hf_split: its split.
            hf_subset: its subset.
            prompt_type: "query" or "document"; texts of other tasks are encoded as queries.
            options: batch size and progress bar, which the model chooses itself.
        """
        batches = list(inputs)
        if prompt_type is not None and prompt_type.value == "document":
            return self._retriever.encode_passages(
                [passage for batch in batches for passage in _passages(batch)]
            )
        return self._retriever.encode_queries([text for batch in batches for text in batch["text"]])

    def similarity(
        self, first: Float[np.ndarray, "rows dim"], second: Float[np.ndarray, "columns dim"]
    ) -> Float[np.ndarray, "rows columns"]:
        """Dot products of all pairs."""
        return np.asarray(first) @ np.asarray(second).T

    def similarity_pairwise(
        self, first: Float[np.ndarray, "pairs dim"], second: Float[np.ndarray, "pairs dim"]
    ) -> Float[np.ndarray, " pairs"]:
        """Dot products of pairs."""
        return np.sum(np.asarray(first) * np.asarray(second), axis=1)


def _passages(batch: Mapping[str, Sequence[str]]) -> list[Passage]:
    bodies = batch.get("body", batch["text"])
    titles = batch.get("title", [""] * len(bodies))
    return [
        Passage(id="", title=title or "", text=body)
        for title, body in zip(titles, bodies, strict=True)
    ]


def _meta(retriever: Retriever, name: str) -> ModelMeta:
    """What MTEB files with its results; what nobody recorded is None."""
    try:
        from mteb.models.model_meta import ModelMeta, ScoringFunction
    except ImportError as error:
        fix = how_to_install("mteb")
        raise ConfigError("mteb is not installed", where="MtebEncoder", fix=fix) from error
    model = retriever.model
    return ModelMeta.create_empty(
        {
            "name": f"{_NAME}/{name}",
            "revision": model.fingerprint,
            "max_tokens": retriever.texts.passage_length,
            "embed_dim": model.model.config.embedding_dim,
            "framework": ["JAX"],
            "similarity_fn_name": ScoringFunction.DOT_PRODUCT,
            "use_instructions": bool(retriever.texts.queries.prompt),
        }
    )
