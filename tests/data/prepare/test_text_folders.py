"""Folders of .txt, .md and .html files: titles, passages and pages."""


def test_a_heading_stands_with_what_follows(prepare_notes):
    text = "## Methods\n\n" + " ".join(f"word{n}" for n in range(12))
    _, store = prepare_notes({"a.txt": text}, passage_words=11)
    assert [passage.text.split()[0] for passage in store] == ["##", "word9"]


def test_text_without_spaces_is_cut_by_letters(prepare_notes):
    _, store = prepare_notes({"a.txt": "上海是最大的城市。水很深。Read this, now"}, passage_words=6)
    texts = ["上海是最大的", "城市。水很深。Read", "this, now"]
    assert [passage.text for passage in store] == texts


def test_a_folder_of_text_files(prepare_notes, caplog):
    long = " ".join(f"word{n}" for n in range(7))
    files = {
        "a b.txt": f"one two\n\nthree\n\n{long}\n",
        "deep.md/page.md": "intro\n\n# A heading #\n\nbody\n",
        "code.md": "Set up:\n\n```bash\n# install\npip\n```\n\n## Use\n\nrun\n",
        "hugo.md": "---\ntitle: 'A post'\n# tags\ntags:\n- x\n\n---\n# Part\n---\nb: b\n",
        "toml.md": '+++\ntitle = "In TOML"\n[x]\ny = 1\n+++\n\nbody',
        "folded.md": "---\ntitle: >-\n  A folded\n  title\nb: c\n---\nbody",
        "untitled.md": '---\ntitle: ""\n---\n# Head\n\nbody',
        "rule.md": "---\nb:\nprose\n---\n",
        "page.html": "<html><head><title>The <b>title</title><style>p {}</style></head><body>"
        "<h1>Head</h1><p>one &amp; two</p><script>no()</script><p>three</p></body></html>",
        "jekyll.html": "---\ntitle: A site\n---\n<h1>{{ page.title }}</h1><p>text</p>",
        "bare.html": "<h2>Only a heading</h2><p>text</p>",
        "empty.txt": "",
        "packed.MD.gz": "# Packed\n\ntext",
        ".obsidian/plugin.md": "no page",
        "__MACOSX/._page.html": "\0",
        "results/decided.gin": "",
        "results/export/README.md": "a model",
        # Judgements and tables are no text.
        "b/qrels.txt": "1|2|1",
        "c.csv": "day,url\n1,\tx\ty\n",
    }
    prepared, store = prepare_notes(files, passage_words=5)
    passages = {passage.id: (passage.title, passage.text, passage.page_id) for passage in store}
    assert passages == {
        "a_b.txt#0": ("a b", "one two three", "a_b.txt"),
        "a_b.txt#1": ("a b", "word0 word1 word2 word3 word4", "a_b.txt"),
        "a_b.txt#2": ("a b", "word5 word6", "a_b.txt"),
        "bare.html#0": ("Only a heading", "text", "bare.html"),
        "jekyll.html#0": ("A site", "text", "jekyll.html"),
        "code.md#0": ("Use", "Set up:", "code.md"),
        "code.md#1": ("Use", "```bash # install pip ```", "code.md"),
        "code.md#2": ("Use", "run", "code.md"),
        "deep.md/page.md#0": ("A heading", "intro body", "deep.md/page.md"),
        "hugo.md#0": ("A post", "# Part --- b: b", "hugo.md"),
        "toml.md#0": ("In TOML", "body", "toml.md"),
        "folded.md#0": ("A folded title", "body", "folded.md"),
        "untitled.md#0": ("Head", "body", "untitled.md"),
        "rule.md#0": ("rule", "--- b: prose ---", "rule.md"),
        "packed.MD.gz#0": ("Packed", "text", "packed.MD.gz"),
        "page.html#0": ("The title", "Head one & two three", "page.html"),
    }
    assert prepared.left_out == {"empty passages": 1}
    assert "b/qrels.txt: the passages are those of .txt," in caplog.text
    assert "c.csv is left out: no columns" in caplog.text


def test_html_as_people_write_it(prepare_notes):
    """Without end tags, with a bare "<" or "<![", and with cells that are no words of one."""
    page = "<HEAD><TITLE>T</TITLE><style>p {}</style><BODY><p>if 3 < 5 and 7 > 2<p>one<br>two"
    files = {
        "page.html": f"{page}<table><tr><td>Bern<td>Aare</table>",
        "word.html": "<p><![if !x]>one<![endif]> <![y>two",
        "open.html": "<h1>head</h1>" + "<h2>open " * 20_000,
        "parts.html": "<title>P</title><header>Menu</header><main>Bern<footer>End</footer>",
        "icon.html": "<title>Page</title>a<svg><title>Search</title><text>b</text></svg> c",
    }
    _, store = prepare_notes(files, passage_words=100_000)
    texts = {passage.page_id: (passage.title, passage.text) for passage in store}
    assert texts["page.html"] == ("T", "if 3 < 5 and 7 > 2 one two Bern Aare")
    assert texts["word.html"] == ("word", "one two")
    assert texts["parts.html"] == ("P", "Menu Bern End")
    assert texts["icon.html"] == ("Page", "a c")
    assert texts["open.html"] == ("head", " ".join(["open"] * 20_000))
