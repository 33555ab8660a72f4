"""Retrieval metrics per query: by answers as in DPR, by qrels as in trec_eval.

Names of measures, as in the tables of the papers reproduced here:

    R@k       1 if at least one of the first k passages is a hit, else 0. A hit contains an answer
              (`evaluate_answers`) or is relevant (`evaluate_qrels`). DPR's "top-k accuracy" and
              "recall@k"; trec_eval's success_k.
    Recall@k  share of the query's relevant passages among the first k; trec_eval's recall_k.
              Equal to R@k if every query has one relevant passage. By qrels only.
    MRR@k     1 / rank of the first hit, 0 if it is below rank k; trec_eval's recip_rank.
    nDCG@k    gain = grade, discount log2(1 + rank); trec_eval's ndcg_cut_k. By qrels only.
    P@k, MAP  trec_eval's P_k and map (MAP@k: map_cut_k). By qrels only.
    Rprec     share of the R relevant passages among the first R; trec_eval's Rprec. By qrels only.

A run is ranked once, by descending score and ascending row. ir_measures gets strictly decreasing
scores, since its providers break ties differently.

Whether a passage contains an answer follows DPR (Karpukhin et al., EMNLP 2020, section 5) and its
evaluation script, on which every published "top-k accuracy" of open-domain retrieval rests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import ir_measures
import numpy as np
import regex
from jaxtyping import Bool, Float64, Int

from taser_jax.retrieval.runs import NO_ROW, Qrels, Run, top_k
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import bar, logger
from taser_jax.storage.records import Query

_TOKENS = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
# The same tokens for ASCII text, with the standard library's faster engine.
_ASCII_TOKENS = re.compile(r"[A-Za-z0-9]+|[!-~]")
_REGEX_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
ANSWER_MEASURES = ("R@1", "R@5", "R@20", "R@100")
QRELS_MEASURES = ("R@1", "R@5", "R@20", "MRR@10", "nDCG@10")

_BY_QRELS: dict[str, ir_measures.measures.Measure] = {
    "R": ir_measures.Success,
    "Recall": ir_measures.R,
    "MRR": ir_measures.RR,
    "nDCG": ir_measures.nDCG,
    "P": ir_measures.P,
    "MAP": ir_measures.AP,
    "Rprec": ir_measures.Rprec,
}
_BY_HITS = ("R", "MRR")
_WITHOUT_CUTOFF = ("MRR", "nDCG", "MAP", "Rprec")
_NEVER_CUT = ("Rprec",)
# One name for each measure: values of R@5 and R@05 would be mixed up.
_CUTOFF = re.compile("[1-9][0-9]*")
# Queries passed to ir_measures at once: its dictionaries would need more memory than the run.
_BLOCK = 1_000
# Queries whose answers are matched between two fetches of passages.
_BLOCK_QUERIES = 256
# Tokenised passages in memory, about 0.3 GB of 100 words each, before those of one more block.
_CACHED = 400_000


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Measures of one run on one task, per query, so that systems can be compared.

    Attributes:
        query_ids: all queries that are averaged over, whether or not the run has them.
        values: measure -> one value per query, in the order of `query_ids`.
    """

    query_ids: tuple[str, ...]
    values: Mapping[str, Float64[np.ndarray, " queries"]]

    @property
    def num_queries(self) -> int:
        """Number of queries that are averaged over."""
        return len(self.query_ids)

    def averages(self) -> dict[str, float]:
        """Measure -> mean over all queries, between 0 and 1."""
        return {measure: float(values.mean()) for measure, values in self.values.items()}


def qrels_of(queries: Iterable[Query]) -> Qrels:
    """Qrels from the positives of queries; omits queries without one, as a qrels file does.

    Raises:
        DataError: no query has a positive.
    """
    qrels: Qrels = {}
    task = ""
    for query in queries:
        task = query.task
        if query.positives:
            grades = query.relevance or (1,) * len(query.positives)
            qrels[query.id] = dict(zip(query.positives, grades, strict=True))
    if not qrels:
        fix = "leave the task out, evaluate it by answers, or give its queries their positives"
        raise DataError("no query has a positive passage", where=f"task {task!r}", fix=fix)
    return qrels


def evaluate_qrels(
    run: Run, qrels: Mapping[str, Mapping[int, int]], measures: Sequence[str] = QRELS_MEASURES
) -> Evaluation:
    """Measures by relevance judgements, over all queries of the qrels.

    A query without results counts as zero; row -1 is no result; queries of the run without
    judgements are ignored.

    Args:
        run: retrieved rows; their order comes from scores, then rows.
        qrels: query id -> row -> grade; relevant from grade 1.
        measures: names as in this module's docstring.

    Raises:
        ConfigError: an unknown measure.
        DataError: no judgements, or no query in common.
    """
    parsed = {_ir_measure(name): name for name in measures}
    results = _by_query(run, qrels.keys(), measures)
    ids = tuple(qrels)
    values = {name: np.zeros(len(ids)) for name in measures}
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        position = {query_id: index for index, query_id in enumerate(block, start)}
        judged = {id: {str(row): grade for row, grade in qrels[id].items()} for id in block}
        ranked = {
            id: {str(row): float(-rank) for rank, row in enumerate(results[id])}
            for id in block
            if id in results
        }
        for metric in ir_measures.iter_calc(list(parsed), judged, ranked):
            values[parsed[metric.measure]][position[metric.query_id]] = metric.value
    return Evaluation(ids, values)


def evaluate_answers(
    run: Run,
    answers: Mapping[str, Sequence[str]],
    matcher: AnswerMatcher,
    measures: Sequence[str] = ANSWER_MEASURES,
) -> Evaluation:
    """Measures by answer match, over all questions.

    A question without results or without answers counts as zero.

    Args:
        run: retrieved rows; their order comes from scores, then rows.
        answers: query id -> its answers, for every question of the task.
        matcher: matches answers in the passages of the run's collection.
        measures: R@k, MRR or MRR@k.

    Raises:
        ConfigError: a measure that is unknown or not defined by answers.
        DataError: no question has an answer, or none is in the run.
    """
    check_measures(measures, by_answers=True)
    if not any(map(len, answers.values())):
        fix = "evaluate this task by qrels, or give its questions their answers"
        raise DataError("no question has an answer", where="evaluation by answers", fix=fix)
    results = _by_query(run, answers.keys(), measures)
    ids = tuple(answers)
    rows = np.full((len(ids), run.rows.shape[1]), NO_ROW, np.int32)
    for index, query_id in enumerate(ids):
        ranked = results.get(query_id, ())
        rows[index, : len(ranked)] = ranked
    hits = matcher.hits(rows, [answers[query_id] for query_id in ids])
    return Evaluation(ids, hit_measures(hits, measures))


def hit_measures(
    hits: Bool[np.ndarray, "queries k"], measures: Sequence[str] = ANSWER_MEASURES
) -> dict[str, Float64[np.ndarray, " queries"]]:
    """R@k and MRR@k of ranked hits.

    Example:
        >>> hits = np.array([[False, True, True], [False, False, False]])
        >>> {name: v.tolist() for name, v in hit_measures(hits, ["R@1", "R@2", "MRR@3"]).items()}
        {'R@1': [0.0, 0.0], 'R@2': [1.0, 0.0], 'MRR@3': [0.5, 0.0]}

    Args:
        hits: True where the passage at that rank is a hit, best rank first.
        measures: R@k, MRR or MRR@k.

    Returns:
        Measure -> one value per query.

    Raises:
        ConfigError: a measure that is unknown or not defined by hits.
    """
    values = {}
    depth = hits.shape[1]
    rank = np.where(hits.any(1), hits.argmax(1) + 1, depth + 1) if depth else np.ones(len(hits))
    for name in measures:
        family, cutoff = _split(name, _BY_HITS)
        within = rank <= min(cutoff or depth, depth)
        values[name] = within / rank if family == "MRR" else within.astype(np.float64)
    return values


def group_averages(groups: Iterable[Evaluation], measure: str) -> tuple[float, float]:
    """Macro and micro average of a measure over groups of queries.

    EntityQuestions' script averages the accuracies of its relation files (macro); TASER's Table A4
    pools the questions (micro).

    Args:
        groups: relations or tasks, of which one at least has the measure.
        measure: its name.

    Returns:
        The mean of the groups' means, and the mean over the queries of all groups together.
    """
    values = [group.values[measure] for group in groups if measure in group.values]
    macro = np.mean([of_group.mean() for of_group in values])
    return float(macro), float(np.concatenate(values).mean())


def _by_query(run: Run, ids: Collection[str], measures: Sequence[str]) -> dict[str, list[int]]:
    """Query id -> its ranked rows, for the queries to be evaluated."""
    depth = run.rows.shape[1]
    deepest = max((_split(name, tuple(_BY_QRELS))[1] or 0 for name in measures), default=0)
    if deepest > depth:
        logger.warning("a measure needs %d results, but the run has %d per query", deepest, depth)
    ranked = top_k(run.rows, run.scores, depth)
    by_query = {
        query_id: [row for row in rows if row != NO_ROW]
        for query_id, rows in zip(run.query_ids, ranked.rows.tolist(), strict=True)
        if query_id in ids
    }
    if not by_query:
        problem = f"none of the {len(ids)} queries to evaluate is among the run's "
        fix = "take a run of the same task and split"
        raise DataError(f"{problem}{len(run.query_ids)}", where="evaluation", fix=fix)
    return by_query


def check_measures(measures: Iterable[str], *, by_answers: bool, where: str = "measures") -> None:
    """Refuses measures that are unknown or, of answers, not defined.

    Raises:
        ConfigError: naming the first, and those that there are.
    """
    for name in measures:
        _split(name, _BY_HITS if by_answers else tuple(_BY_QRELS), where=where)


def _split(
    name: str, families: Sequence[str], *, where: str = "measures"
) -> tuple[str, int | None]:
    """'R@20' -> ('R', 20); 'MRR' -> ('MRR', None)."""
    family, at, cutoff = name.partition("@")
    is_cut = _CUTOFF.fullmatch(cutoff) and family not in _NEVER_CUT
    good_cutoff = is_cut if at else family in _WITHOUT_CUTOFF
    if family not in families or not good_cutoff:
        names = (family if family in _NEVER_CUT else f"{family}@k" for family in families)
        fix = f"take one of {', '.join(names)}, such as R@20; nDCG and Recall need qrels"
        raise ConfigError(f"measure {name!r}", where=where, fix=fix)
    return family, int(cutoff) if at else None


def _ir_measure(name: str) -> ir_measures.measures.Measure:
    family, cutoff = _split(name, tuple(_BY_QRELS))
    measure = _BY_QRELS[family]
    return measure @ cutoff if cutoff else measure


class AnswerMatch(enum.Enum):
    """How an answer is matched in a passage's body (never in its title).

    STRING: the answer's tokens are a contiguous run of the passage's tokens, after NFD
        normalisation and lower-casing; punctuation counts, articles are kept. As in DPR's script,
        an answer without tokens (white space only) is in every passage.
    REGEX: the answer is a regular expression searched in the NFD-normalised text, ignoring case
        (CuratedTREC). A pattern that does not compile matches nothing.
    """

    STRING = "string"
    REGEX = "regex"


def tokenize(text: str) -> list[str]:
    """DPR's tokens of a text: runs of letters, digits and marks, or one visible character.

    Example:
        >>> tokenize("The U.S. won 3-1")
        ['the', 'u', '.', 's', '.', 'won', '3', '-', '1']

    Args:
        text: any text.

    Returns:
        Tokens, NFD-normalised and lower-cased.
    """
    return _padded(text).split()


def _padded(text: str) -> str:
    """Tokens between single spaces, and one space at each end.

    No token contains a space, so "the answer's tokens are a contiguous sublist" is equivalent to
    "the answer's padded string is a substring", which runs in C. Lower-casing after joining equals
    lower-casing each token, because a space ends a word for the final sigma too.
    """
    if text.isascii():
        tokens = _ASCII_TOKENS.findall(text)
    else:
        tokens = _TOKENS.findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(tokens)} ".lower()


def _nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _answer_test(answers: Sequence[str], match: AnswerMatch) -> Callable[[str], bool]:
    """Whether a prepared passage contains one of a question's answers."""
    if match is AnswerMatch.STRING:
        padded = [_padded(answer) for answer in answers]
        return lambda passage: any(answer.isspace() or answer in passage for answer in padded)
    patterns = []
    for answer in answers:
        with contextlib.suppress(regex.error, RecursionError, OverflowError):
            patterns.append(regex.compile(_nfd(answer), _REGEX_FLAGS))
    return lambda passage: any(pattern.search(passage) for pattern in patterns)


class AnswerMatcher:
    """Answer checks over whole runs, each passage fetched and tokenised once.

    Tokenised passages are cached by row; beyond some hundred thousand all are forgotten.

    Example:
        def text_of(rows):
            return [passage.text for passage in store.get_many(rows)]

        hits = AnswerMatcher(text_of).hits(run.rows, [query.answers for query in queries])

    Args:
        text_of: rows -> the passages' bodies, in the same order.
        match: how to match.
    """

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], list[str]],
        *,
        match: AnswerMatch = AnswerMatch.STRING,
    ) -> None:
        self._match, self._text_of = match, text_of
        self._cache: dict[int, str] = {}

    def hits(
        self, rows: Int[np.ndarray, "queries k"], answers: Sequence[Sequence[str]]
    ) -> Bool[np.ndarray, "queries k"]:
        """Which retrieved passages contain an answer of their query.

        Args:
            rows: rows of the passage store, one list per query; -1 for no result.
            answers: each query's answers, parallel to `rows`.

        Returns:
            True if the passage contains an answer; always False at -1.
        """
        hits = np.zeros(rows.shape, bool)
        with bar("answer match", total=len(rows), unit="query") as progress:
            for start in range(0, len(rows), _BLOCK_QUERIES):
                block = rows[start : start + _BLOCK_QUERIES]
                prepared = self._passages(np.unique(block))
                for index, passage_rows in enumerate(block.tolist(), start):
                    is_in = _answer_test(answers[index], self._match)
                    hits[index] = [row >= 0 and is_in(prepared[row]) for row in passage_rows]
                progress.update(len(block))
        return hits

    def _passages(self, rows: Int[np.ndarray, " rows"]) -> Mapping[int, str]:
        """Prepared passages, those of distinct rows at least; none of -1."""
        if len(self._cache) > _CACHED:
            self._cache.clear()
        missing = [row for row in rows.tolist() if row >= 0 and row not in self._cache]
        if missing:
            form = _padded if self._match is AnswerMatch.STRING else _nfd
            texts = zip(missing, self._text_of(missing), strict=True)
            self._cache.update((row, form(text)) for row, text in texts)
        return self._cache
