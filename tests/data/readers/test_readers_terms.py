"""MeSH's XML, and thesauri as JSON lines."""

import gzip

import pytest

from taser_jax.data.readers.passages import read_passages
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

MESH = """<?xml version="1.0"?>
<!DOCTYPE DescriptorRecordSet SYSTEM "desc2006.dtd">
<DescriptorRecordSet><DescriptorRecord>
 <DescriptorName><String>Temefos</String></DescriptorName>
 <ConceptList>
  <Concept PreferredConceptYN="Y"><ConceptUI>M2</ConceptUI>
   <ConceptName><String>Temefos</String></ConceptName>
   <ScopeNote>An organothiophosphate
     insecticide &amp; larvicide.</ScopeNote>
   <TermList><Term><TermUI>T1</TermUI><String>Abate</String></Term></TermList>
  </Concept>
  <Concept><ConceptUI>M3</ConceptUI><ConceptName><String>Abate</String></ConceptName></Concept>
 </ConceptList>
</DescriptorRecord></DescriptorRecordSet>
"""


def passages(located):
    return [one.passage for one in located]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_scope_note_is_a_passage_with_its_concepts_name(tmp_path):
    expected = [Passage("M2", "An organothiophosphate insecticide & larvicide.", "Temefos")]
    assert passages(read_passages(write(tmp_path / "desc.xml", MESH))) == expected
    with gzip.open(tmp_path / "qual.xml.gz", "wt") as file:
        file.write(MESH.replace("DescriptorRecordSet", "QualifierRecordSet"))
    assert passages(read_passages(tmp_path / "qual.xml.gz")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MESH[:-40], r"desc\.xml:\d+: not complete XML"),
        ("no xml", "not complete XML"),
        ("<PubmedArticleSet></PubmedArticleSet>", r"(?s)root element is 'PubmedArticleSet'"),
        (MESH.replace("ScopeNote", "Note"), "no concept has a ScopeNote"),
        (
            MESH.replace("M3", "M2").replace(
                "Abate</String></ConceptName>",
                "A</String></ConceptName><ScopeNote>Again.</ScopeNote>",
            ),
            "'M2' was already used",
        ),
    ],
)
def test_mesh_files_that_cannot_be_used(text, message, tmp_path):
    with pytest.raises(DataError, match=message):
        list(read_passages(write(tmp_path / "desc.xml", text)))


def test_defined_terms(tmp_path):
    lines = [
        '{"id": "DOID:4", "name": "disease", "definition": "A disposition."}',
        '{"id": "DOID:5", "name": "undefined", "definition": ""}',
        '{"name": "pain", "definition": "It hurts.", "synonyms": ["ache"]}',
    ]
    path = write(tmp_path / "terms.jsonl", "\n".join(lines))
    assert passages(read_passages(path)) == [
        Passage("DOID:4", "A disposition.", "disease"),
        Passage("pain", "It hurts.", "pain"),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"id": "1", "definition": "x"}',
            r"terms\.jsonl:1, .*the term '1' has no name",
        ),
        ('{"id": "1", "name": "a"}', "no term has a definition"),
        ('{"id": "1", "name": "a", "definition": "x"}\n' * 2, "'1' was already used"),
        ('{"id": "1", "name": 3, "definition": "x"}', "name is 3: expected a string"),
    ],
)
def test_thesauri_that_cannot_be_used(lines, message, tmp_path):
    with pytest.raises(DataError, match=message):
        list(read_passages(write(tmp_path / "terms.jsonl", lines)))
