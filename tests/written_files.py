"""Files of passages, questions and judgements, as tests of readers and of `prepare` write them."""

import gzip
import json
import pathlib
from collections.abc import Iterable, Mapping

Content = str | bytes | Iterable[object]


def json_lines(*records: object) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(record) + "\n" for record in records)


def write(path: pathlib.Path, content: Content) -> pathlib.Path:
    """Writes text, bytes, or records as JSON lines; `.gz` is compressed, and folders are made."""
    text = content if isinstance(content, str | bytes) else json_lines(*content)
    data = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_all(folder: pathlib.Path, files: Mapping[str, Content]) -> pathlib.Path:
    """Writes several files, by their names in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write(folder / name, content)
    return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """The files below a folder: path in it -> bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_run(path: pathlib.Path, ranked: Mapping[str, Mapping[str, float]]) -> pathlib.Path:
    """A run in TREC's format: query -> passage -> score, best first."""
    lines = [
        f"{query} Q0 {passage} {rank} {score} hand\n"
        for query, scores in ranked.items()
        for rank, (passage, score) in enumerate(scores.items(), start=1)
    ]
    return write(path, "".join(lines))


def run_of(path: str | pathlib.Path) -> dict[str, dict[str, float]]:
    """Query -> passage -> score of a run, best first, read line by line."""
    ranked: dict[str, dict[str, float]] = {}
    for line in pathlib.Path(path).read_text().splitlines():
        query, _, passage, rank, score, _ = line.split()
        ranked.setdefault(query, {})[passage] = float(score)
        assert int(rank) == len(ranked[query])
    return ranked


def beir(
    folder: pathlib.Path,
    *,
    corpus: Mapping[str, str],
    queries: Mapping[str, str],
    ending: str = "",
    **judged: Iterable[str],
) -> pathlib.Path:
    """A folder in BEIR's layout.

    Args:
        folder: the folder.
        corpus: id -> text.
        queries: id -> text.
        ending: of every file's name, such as ".gz".
        judged: name of a file in qrels/ -> its rows, such as "q1 d1 1".
    """
    texts = {"corpus.jsonl": corpus, "queries.jsonl": queries}
    files: dict[str, Content] = {
        name: [{"_id": id, "text": text} for id, text in of.items()] for name, of in texts.items()
    }
    for name, rows in judged.items():
        lines = ["query-id corpus-id score", *rows]
        files[f"qrels/{name}.tsv"] = "".join("\t".join(line.split()) + "\n" for line in lines)
    return write_all(folder, {f"{name}{ending}": content for name, content in files.items()})


def tsv(
    folder: pathlib.Path,
    passages: Mapping[str, str],
    asked: Mapping[str, Mapping[str, tuple[str, str]]],
) -> pathlib.Path:
    """A folder in the layout that `taser init` names.

    Args:
        folder: the folder.
        passages: id -> text.
        asked: "task.split" -> id of a question -> its text and its passage.
    """
    texts = "".join(f"{id}\t{text}\t\n" for id, text in passages.items())
    files: dict[str, Content] = {"passages.tsv": f"id\ttext\ttitle\n{texts}"}
    for name, questions in asked.items():
        lines = [(f"{id}\t{text}\n", f"{id}\t0\t{p}\t1\n") for id, (text, p) in questions.items()]
        files[f"{name}.queries.tsv"] = "".join(question for question, _ in lines)
        files[f"{name}.qrels.tsv"] = "".join(judgement for _, judgement in lines)
    return write_all(folder, files)


def kilt_mini(folder: pathlib.Path, *, queries: int) -> pathlib.Path:
    """A folder in kilt_mini's layout: thirty passages, and queries of fm2, each on one of them."""
    rows = "".join(f'{n}\t"text ""{n}"""\ttitle {n}\t{n}\t0\n' for n in range(30))
    lines: list[object] = [
        {"id": f"q{n}", "input": f"claim {n}", "output": [{"provenance": [{"passage_id": f"{n}"}]}]}
        for n in range(queries)
    ]
    header = "id\ttext\ttitle\twikipedia_id\tparagraph_id\n"
    return write_all(folder, {"passages.tsv": header + rows, "fm2-dev.jsonl": lines})
