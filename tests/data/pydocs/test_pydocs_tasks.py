import pytest

from taser_jax.data.pydocs.build import candidates, cut_elements, fair_questions
from taser_jax.data.pydocs.objects import (
    MAX_WORDS,
    DocumentedObject,
    assign,
    build_corpus,
    split_of,
)
from taser_jax.data.pydocs.parse import parse_docstring

FILLER = " ".join(f"filler{i}" for i in range(30)) + "."


def documented(name, doc, body="", names=()):
    return DocumentedObject(name, (name, *names), parse_docstring(doc), body)


def spread(objects, split="train"):
    return (split,) * len(objects), tuple(range(len(objects)))


def questions(objects, task, assignment=None):
    fair = fair_questions(candidates(objects), *(assignment or spread(objects)))
    return [q for q in fair if q.task == task]


def unique(name, text):
    return documented(name, f"{text}\n\n" + " ".join(f"{name}{i}" for i in range(30)) + ".")


def test_a_summary_is_cut_only_where_twenty_words_remain():
    long = documented("a.long", "Computes the total of things.\n\n" + FILLER)
    short = documented("a.short", "Divides one thing by another.\n\nOnly a few words more here.")
    asked = questions([long, short], "summary")
    assert [q.text for q in asked] == ["Computes the total of things."]
    cuts = cut_elements([long, short], asked)
    assert cuts == [{0}, set()]
    texts = [passage.text for passage in build_corpus([long, short], cuts).passages]
    assert texts == [FILLER, "Divides one thing by another. Only a few words more here."]


def test_at_most_two_parameters_rarest_first_and_shared_text_is_cut_everywhere():
    axis = "axis: the axis along which it is computed."
    parameters = {
        "a.sum": ("p: first rare text of it", "q: second rare text is here"),
        "b.mean": ("r: third rare text is this", "s: fourth rare text is that"),
        "c.mode": (),
    }
    objects = [
        documented(name, "\n  ".join([f"Sums.\n\n{FILLER}\n\nArgs:", axis, *others]))
        for name, others in parameters.items()
    ]
    asked = questions(objects, "parameter")
    parts = {(q.target, q.detail) for q in asked}
    assert parts == {(0, "p"), (0, "q"), (1, "r"), (1, "s"), (2, "axis")}
    assert [q.gold for q in asked if q.detail == "axis"] == [(2, 0, 1)]
    corpus = build_corpus(objects, cut_elements(objects, asked))
    assert not [p for p in corpus.passages if "axis along which" in p.text]


def test_equal_questions_are_one_if_few_objects_of_one_split_answer_it():
    objects = [unique(f"o{i}", "Return the sum of it" + ".!"[i % 2]) for i in range(5)]
    (asked,) = questions(objects[:2], "summary")
    assert asked.gold == (0, 1)
    assert len(questions(objects[:4], "summary")) == 1
    assert not questions(objects, "summary")
    # Five objects that say the same are one cluster.
    assert len(questions(objects, "summary", (("train",) * 5, (0,) * 5))) == 1
    assert not questions(objects[:2], "summary", (("train", "test"), (0, 1)))


def test_see_also_is_answered_by_the_object_mentioned_in_the_nearest_scope():
    see = "Sorts.\n\n" + FILLER + "\n\nSee Also\n--------\nfind : Looks for a thing.\n"
    objects = [
        documented("pkg.find", "Not this. " + FILLER),
        documented("pkg.mod.Table.find", "Looks up rows. " + FILLER.replace("filler", "row")),
        documented("pkg.mod.Table.sort", see),
    ]
    (asked,) = questions(objects, "see_also")
    assert asked.text == "Looks for a thing."
    assert asked.gold == (1,)


def test_code_and_example_queries():
    body = "total = 0\nfor value in values:\n    total += value\nreturn total / len(values)"
    objects = [documented("a.mean", "Mean.\n\n>>> mean([1, 2, 3], weight=2)\n4.0", body)]
    assert [q.text for q in questions(objects, "code")] == [" ".join(body.split())]
    [example] = questions(objects, "example")
    assert example.text == "mean([1, 2, 3], weight=2)"


def test_near_copies_share_a_split_and_copies_their_gold():
    base = " ".join(f"word{i}" for i in range(40))
    objects = [
        documented("one.run", base + " and an ending"),
        documented("two.run", base + " but another one"),
        documented("three.go", base + " and an ending"),
        documented("four.stop", " ".join(f"other{i}" for i in range(40))),
    ]
    split, cluster = assign(objects)
    assert split[0] == split[1] == split[2]
    assert cluster[0] == cluster[2] != cluster[1]
    assert cluster[3] == 3


def test_splits_have_their_shares():
    drawn = [split_of(f"family{i}") for i in range(20_000)]
    assert drawn.count("test") / len(drawn) == pytest.approx(0.22, abs=0.01)
    assert drawn.count("validation") / len(drawn) == pytest.approx(0.10, abs=0.01)


def test_long_texts_become_passages_that_lose_nothing():
    sentences = [" ".join(f"w{i}x{j}" for j in range(30)) + "." for i in range(9)]
    doc = "Summary here. " + " ".join(s[0].upper() + s[1:] for s in sentences)
    item = documented("a.b", doc + "\n\n" + " ".join(f"v{i}" for i in range(250)))
    corpus = build_corpus([item], [set()])
    assert " ".join(p.text for p in corpus.passages) == " ".join(e.text for e in item.doc.elements)
    assert all(10 <= len(p.text.split()) <= MAX_WORDS + 10 for p in corpus.passages)
    assert [p.id for p in corpus.passages] == [f"a.b#{i}" for i in range(len(corpus.passages))]
    assert list(corpus.rows[0]) == list(range(len(corpus.passages)))
    # The row of each element is one that holds its beginning or follows it.
    assert corpus.element_rows[0] == sorted(corpus.element_rows[0])
