import pytest

from taser_jax.data.pydocs.parse import ElementKind, SeeAlso, parse_docstring

NUMPY = """\
add(a, b, /, out=None)

Add arguments element-wise, e.g. two arrays. The second sentence
refers to :func:`numpy.sum` and ``out`` [1]_.

Parameters
----------
a, b : array_like
    The arrays to be added.

    If shapes differ they must broadcast.
out : ndarray, optional
    Where the result goes.

Returns
-------
sum : ndarray
    The sum of `a` and `b`.

See Also
--------
numpy.subtract : Subtract arguments,
    element-wise.
sum, prod

References
----------
.. [1] A paper nobody should find.

Examples
--------
Adding ranges:

>>> import numpy as np
>>> np.add(np.arange(3), np.arange(3))
array([0, 2, 4])
"""


def test_numpydoc_is_taken_apart():
    parsed = parse_docstring(NUMPY)
    assert [(e.kind, e.text) for e in parsed.elements] == [
        (ElementKind.SUMMARY, "Add arguments element-wise, e.g. two arrays."),
        (ElementKind.PROSE, "The second sentence refers to numpy.sum and out."),
        (
            ElementKind.PARAMETER,
            "a, b (array_like): The arrays to be added. If shapes differ they must broadcast.",
        ),
        (ElementKind.PARAMETER, "out (ndarray, optional): Where the result goes."),
        (ElementKind.PROSE, "sum : ndarray The sum of a and b."),
    ]
    assert parsed.elements[3].name == "out"
    assert parsed.elements[3].description == "Where the result goes."
    assert parsed.examples == ("np.add(np.arange(3), np.arange(3))",)
    assert parsed.see_also == (SeeAlso("numpy.subtract", "Subtract arguments, element-wise."),)


def test_google_sections_and_literal_blocks():
    parsed = parse_docstring(
        "Scale updates.\n\nArgs:\n  rate: how much\n    to scale by.\n  mask (tree): what to keep."
        "\n\nReturns:\n  Scaled updates.\n\nSee also:\n  - :func:`optax.chain`: run them in order."
        "\n\nExample::\n\n  tx = scale(0.1)\n  state = tx.init(params)\n\nLast words."
    )
    assert [e.text for e in parsed.elements] == [
        "Scale updates.",
        "rate: how much to scale by.",
        "mask (tree): what to keep.",
        "Scaled updates.",
        "Last words.",
    ]
    assert parsed.examples == ("tx = scale(0.1)\nstate = tx.init(params)",)
    assert parsed.see_also == (SeeAlso("optax.chain", "run them in order."),)


def test_sphinx_fields():
    parsed = parse_docstring(
        "Open it.\n\n:param str path: where it\n  lives.\n:type path: str\n:returns: a handle\n"
        ":math:`x^2` is no field."
    )
    assert [(e.text, e.name) for e in parsed.elements] == [
        ("Open it.", ""),
        ("path (str): where it lives.", "path"),
        ("returns: a handle x^2 is no field.", ""),
    ]


@pytest.mark.parametrize(
    ("doc", "texts"),
    [
        ("<function f at 0x7f3a2b> is shown.", ["<function f> is shown."]),
        ("Kept.\nAlias on this platform (Linux x86_64): int64.", ["Kept."]),
        ("f(x, y=1) -> int", []),
        ("sums(x, axis=(0, 1)) -> int\n\nSums (all) it.", ["Sums (all) it."]),
        ("call(x) returns (y)", ["call(x) returns (y)"]),
        ("f(x) -> Return the number.", ["Return the number."]),
        ("", []),
        ("Note it.\n\n.. versionadded:: 1.2\n   Gone.\n\n.. note:: Stays.", ["Note it.", "Stays."]),
        ("Code:\n\n```python\nx = call(1, 2, 3, 4)\n```\nMore text.", ["More text."]),
    ],
)
def test_what_is_not_text_is_dropped(doc, texts):
    assert [e.text for e in parse_docstring(doc).elements] == texts


def test_examples_must_be_python_and_lose_prompts_outputs_and_imports():
    parsed = parse_docstring(
        "Formula::\n\n    out[i] = total(a[i], b[i])\n\nNot code::\n\n    just some indented words"
        "\n\n>>> from a import b\n>>> for i in range(3):  # doctest: +SKIP\n"
        "...     b(i, i + 1, x)\n1"
    )
    assert parsed.examples == (
        "for i in range(3):\n    b(i, i + 1, x)",
        "out[i] = total(a[i], b[i])",
    )


def test_long_see_also_and_nested_markup_take_linear_time():
    line = "name_" * 400 + ", " + "`a`, " * 4000
    assert parse_docstring("Sum.\n\nSee Also\n--------\n" + "\n".join([line] * 50)).see_also == ()
