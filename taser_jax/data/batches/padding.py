"""The lengths that texts of a batch are padded to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.devices.mesh import HostShare
from taser_jax.models.batch import EncoderInput, TokenGroups
from taser_jax.storage.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Padding:
    """The lengths that texts of a batch are padded to.

    Attributes:
        buckets: ascending lengths; the texts of a batch are grouped by the one they are padded to.
            The length of the longest possible text is always one; without others, all texts are
            padded to it.
        multiple: group sizes are multiples of this: devices times chunks.
        steps: number of first steps whose batches decide the groups.
    """

    buckets: tuple[int, ...] = ()
    multiple: int = 1
    steps: int = 1024

    def __post_init__(self) -> None:
        buckets = list(self.buckets)
        if buckets != sorted(set(buckets)) or any(length < 1 for length in buckets):
            fix = "give ascending lengths above 0, such as [16, 32, 64, 128, 256]"
            where = "TrainingConfig.length_buckets"
            raise ConfigError(f"buckets of {buckets} tokens", where=where, fix=fix)


@runtime_checkable
class Texts(Protocol):
    """A token store's passages, or one split of its queries."""

    @property
    def lengths(self) -> Int[np.ndarray, " texts"]:
        """Real tokens of each text."""

    def tokens(self, rows: np.ndarray) -> EncoderInput:
        """The given rows, padded to one length: tokens, states, or queries with documents."""


@runtime_checkable
class OtherTexts(Protocol):
    """Texts that replace a token store's tokens in batches: states, or queries with documents."""

    @property
    def passages(self) -> Texts:
        """The texts of all passages."""

    def of_queries(self, queries: TokenizedQueries) -> Texts:
        """The texts of these queries, which may be a part of their split."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes and lengths of the groups in which one side of every batch is padded.

    Example:
        Four texts per batch, of 3, 5, 9, 30 and of 4, 7, 20, 21 tokens, in buckets of 8 and 32. The
        shorter two never have more than 4 and 7 tokens, the longer two 20 and 30: two groups of
        two, of 8 and of 32 tokens.

    Attributes:
        sizes: number of texts in each group, over all devices.
        lengths: tokens that the texts of each group are padded to, ascending.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, lengths: Int[np.ndarray, "steps texts"], padding: Padding, *, longest: int
    ) -> Layout:
        """The least padding that holds every one of these batches.

        Args:
            lengths: real tokens of the texts of each batch.
            padding: buckets and multiple.
            longest: tokens of the longest possible text.
        """
        buckets = np.array([*(each for each in padding.buckets if each < longest), longest])
        # The i-th entry is the longest of the batches' i-th shortest texts.
        needed = np.sort(lengths, axis=1).max(axis=0)
        padded = buckets[np.searchsorted(buckets, needed)]
        padded = padded.reshape(-1, padding.multiple).max(axis=1)
        found, counts = np.unique(padded, return_counts=True)
        return cls(tuple((counts * padding.multiple).tolist()), tuple(found.tolist()))

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(texts, length) of each group."""
        return tuple(zip(self.sizes, self.lengths, strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{size} x {length}" for size, length in self.groups)

    def holds(self, lengths: Int[np.ndarray, " texts"]) -> bool:
        """Whether texts of these ascending lengths fit into the groups."""
        return bool((np.sort(lengths) <= np.repeat(self.lengths, self.sizes)).all())

    def group(self, texts: Texts, rows: Int[np.ndarray, " batch"], share: HostShare) -> TokenGroups:
        """This host's share of a global batch's texts, in groups.

        Args:
            texts: all texts of the side.
            rows: rows of the global batch.
            share: the part of each group, and of the batch, that this host makes.
        """
        order = np.argsort(texts.lengths[rows], kind="stable")
        place = np.empty(len(rows), np.int32)
        place[order] = np.arange(len(rows), dtype=np.int32)
        members = np.split(order, np.cumsum(self.sizes)[:-1])
        groups = tuple(
            texts.tokens(rows[member[share.rows(len(member))]]).resized(length)
            for member, length in zip(members, self.lengths, strict=True)
        )
        return TokenGroups(groups, place[share.rows(len(rows))])


# Quantile -> tokens of a text; 0 and 1 are the shortest and the longest text.
LengthQuantiles = Mapping[float, int]


def lengths_at(
    quantiles: LengthQuantiles, places: Float[np.ndarray, "*shape"]
) -> Int[np.ndarray, "*shape"]:
    """Tokens of the texts at given places of a distribution, between quantiles in a straight line.

    Example:
        >>> lengths_at({0: 8, 0.5: 12, 1: 30}, np.array([0.25, 0.5, 0.9])).tolist()
        [10, 12, 27]

    Args:
        quantiles: quantile -> tokens.
        places: from 0, the shortest text, to 1, the longest.
    """
    ascending = sorted(quantiles)
    tokens = np.interp(places, ascending, [quantiles[each] for each in ascending])
    return np.ceil(tokens).astype(np.int64)


def drawn_lengths(
    quantiles: LengthQuantiles, *, steps: int, texts: int
) -> Int[np.ndarray, "steps texts"]:
    """Tokens of texts drawn from a distribution, always the same ones."""
    return lengths_at(quantiles, np.random.default_rng(0).random((steps, texts)))
