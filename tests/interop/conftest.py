"""What the tests of exports share."""

import pytest


@pytest.fixture(scope="session")
def sentence_transformer():
    """Directory -> sentence-transformers' model of it. Its import alone takes ten seconds."""
    library = pytest.importorskip("sentence_transformers")
    return lambda directory, **options: library.SentenceTransformer(
        str(directory), device="cpu", local_files_only=True, **options
    )
