"""What the packaged recipes set, held to what the papers state."""

from __future__ import annotations

import recipes

from taser_jax.retrieval.bm25 import Possessives
from taser_jax.retrieval.mining import AnswerContaining, Excluded


def test_tasers_second_negatives_are_the_top_hundred_without_the_gold():
    """TASER, appendix B: "top-100 ranked passages for each question excluding the gold passage"."""
    setting = recipes.value("pipeline taser", "setting", "runs/pipeline_taser.gin")
    second = setting.second_mining
    assert (second.depth, second.count) == (100, 100)
    assert (second.excluded, second.answer_containing) == (Excluded.GOLD, AnswerContaining.KEEP)
    # P1 is DPR's: BM25's best without an answer.
    assert setting.first_mining.answer_containing is AnswerContaining.DROP


def test_the_rate_of_the_paper_does_not_stand_beside_the_decay_of_the_code():
    """TASER, appendix C: a rate of 3e-5 or 5e-5 and no decay; its code: 2e-5 and 0.8."""
    training = recipes.value("train", "training", "runs/taser_base.gin")
    assert training.optimizer.learning_rate in (3e-5, 5e-5)
    assert training.optimizer.layer_decay is None


def test_bm25_takes_words_as_lucene_does():
    setting = recipes.value("pipeline taser", "setting", "runs/pipeline_taser.gin")
    assert setting.bm25.possessives is Possessives.STRIP
