"""TREC's topics, in SGML and in each track's XML."""

import re

import pytest
from written_files import write

from taser_jax.data.readers.questions import read_questions
from taser_jax.storage.errors import DataError

COVID = """<?xml version="1.0" encoding="UTF-8"?>
<!-- A licence. -->
<topics task="COVIDSearch" batch="1">
  <topic number="1">
    <query>coronavirus origin</query>
    <question>what is the origin of COVID-19</question>
    <narrative>seeking range of information</narrative>
  </topic>
  <topic number="2">
    <query></query>
    <question>how does it
      respond to <b>cold</b> &amp; heat</question>
  </topic>
</topics>
"""
CLINICAL = """<topics task="2021 TREC Clinical Trials">
<topic number="1">
Patient is a 45-year-old man
with a tumour.
</topic>
</topics>
"""
DECISIONS = """<topics>
<topic number="7" type="diagnosis">
  <note>78 M w/ pmh of CABG</note>
  <description>A 78 year old male.</description>
  <summary>A man.</summary>
</topic>
</topics>
"""
PRECISION = """<topics task="2017 TREC Precision Medicine">
  <topic number="1">
    <disease>Liposarcoma</disease>
    <gene>CDK4 Amplification</gene>
    <demographic>38-year-old male</demographic>
  </topic></topics>
"""
TOUCHE = "<topics><topic><number>3</number><title>Tea?</title><description/></topic></topics>"
FIRE = """<?xml version="1.0"?>
<topics>
<top lang='en'>
<num>26</num>
<title>Singur</title>
<desc>More.</desc>
</top>
</topics>
"""


# What they are -> a file of them, and its questions.
TOPICS = {
    "covid": (COVID, [("1", "coronavirus origin"), ("2", "how does it respond to cold & heat")]),
    "namespace": (TOUCHE.replace("<topics", "<topics xmlns='http://t.org'"), [("3", "Tea?")]),
    "prefix": (re.sub("<(/?)", r"<\1t:", TOUCHE).replace(">", " xmlns:t='u'>", 1), [("3", "Tea?")]),
    "free text": (CLINICAL, [("1", "Patient is a 45-year-old man with a tumour.")]),
    "decisions": (DECISIONS, [("7", "A 78 year old male.")]),
    "summary": (DECISIONS.replace("description", "narrative"), [("7", "A man.")]),
    "diseases": (PRECISION, [("1", "Liposarcoma CDK4 Amplification 38-year-old male")]),
    "number": (TOUCHE, [("3", "Tea?")]),
    "fire": (FIRE, [("26", "Singur")]),
    "sgml": (
        "<top>\n<num> Number: 4\n<title>\n<desc> Description:\nmore\n</top>\n",
        [("4", "more")],
    ),
}


@pytest.mark.parametrize("name", TOPICS)
def test_topics_of_trec_are_their_title_or_query_or_else_the_next_part(tmp_path, name):
    content, questions = TOPICS[name]
    path = write(tmp_path / "topics.xml.gz", content)
    assert [(question.id, question.text) for question in read_questions(path)] == questions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (COVID[:-40], ":12: not complete XML"),
        (COVID.replace("&amp;", "&"), r":12: not complete XML(.|\n)*&amp;"),
        (f"<!DOCTYPE t [\n<!ENTITY a 'aa'>]>\n{CLINICAL}", ":2: it declares entities"),
    ],
)
def test_bad_xml_names_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=rf"t\.xml{message}"):
        list(read_questions(write(tmp_path / "t.xml", content)))
