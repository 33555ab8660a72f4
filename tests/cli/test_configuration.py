"""Which binding wins, and that whatever is wrong is an error that names the right name."""

import dataclasses
import enum
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from taser_jax.cli import configuration
from taser_jax.cli.command_table import at_home, fits, fix_of, shown
from taser_jax.cli.configuration import GinFlags
from taser_jax.cli.gin_files import literal
from taser_jax.interop.pretrained import Pretrained
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Positive


class Flavour(enum.Enum):
    SWEET = "sweet"
    SALTY = "salty"


@dataclasses.dataclass(frozen=True)
class SauceConfig:
    flavour: Flavour = Flavour.SWEET
    layers: tuple[int, ...] | None = None
    amount: float = 1.0

    def __post_init__(self):
        assert self.amount > 0


@dataclasses.dataclass(frozen=True)
class GarnishConfig:
    sauce: SauceConfig | None = None


def cook(
    *,
    dish: str,
    sauce: SauceConfig | None = SauceConfig(),
    portions: Positive = 1,
    note: str = "",
    garnish: GarnishConfig | None = None,
):
    return dish, sauce, portions, note


BASE = """
DISH = %gin.REQUIRED
FLAVOUR = 'sweet'
cook.dish = %DISH
cook.sauce = @SauceConfig()
SauceConfig.flavour = %FLAVOUR
"""


FILES = {
    "defaults": "PORTIONS = 3\ncook.portions = %PORTIONS\n",
    "command": "PORTIONS = %gin.REQUIRED\ncook.portions = %PORTIONS\n",
    "party": "PORTIONS = 6\nhot/cook.portions = 5\ncook.note = 'oat'\n",
    "a": "include 'b.gin'\n",
    "b": "include 'a.gin'\n",
}


@pytest.fixture
def resolve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / f"{name}.gin").write_text(text)

    def call(text=BASE, *bindings, function=cook, files=(), allow_unset=False, **others):
        (tmp_path / "base.gin").write_text(text)
        pairs = tuple(binding.split("=", 1) for binding in bindings)
        flags = GinFlags(files=("base.gin", *files), bindings=pairs, **others)
        return configuration.resolve(function, flags=flags, allow_unset=allow_unset)

    return call


def test_files_bindings_and_enums_come_together(resolve):
    resolved = resolve(BASE, "DISH=noodle soup", "FLAVOUR=salty", "SauceConfig.layers=[1, 2]")
    assert resolved.function() == ("noodle soup", SauceConfig(Flavour.SALTY, (1, 2)), 1, "")
    assert resolved.unused == ()
    assert resolved.unset == ()
    assert "noodle soup" in resolved.text
    # What was resolved before is forgotten.
    assert resolve(BASE, "DISH=pie").function()[1] == SauceConfig()


def test_what_the_command_does_not_reach_is_neither_asked_for_nor_in_the_text(resolve, tmp_path):
    text = BASE + "OTHER = %gin.REQUIRED\nGarnishConfig.sauce = %OTHER\n"
    first = resolve(text, "DISH=pie", "cook.sauce=None")
    assert first.unused == ("FLAVOUR", "GarnishConfig.sauce", "OTHER", "SauceConfig.flavour")
    assert "cook.dish = %DISH" in first.text
    assert not any(word in first.text for word in ("OTHER", "SauceConfig", "FLAVOUR"))
    (tmp_path / "config.gin").write_text(first.text)
    assert resolve(BASE, files=["config.gin"]).function() == first.function()


def test_later_files_win_over_earlier_and_the_command_line_over_both(resolve, tmp_path):
    (tmp_path / "second.gin").write_text("DISH = 'second'\ncook.portions = 2\n")
    assert resolve(BASE, files=["second.gin"]).function()[::2] == ("second", 2)
    assert resolve(BASE, "DISH=third", files=["second.gin"]).function()[::2] == ("third", 2)


@pytest.mark.parametrize(
    ("project", "dish"),
    [
        # Beside the defaults, which it does not replace.
        ("DISH = 'pie'\ncook.portions = 2\n", "pie"),
        ("cook.portions = 2\nDISH = 'stew'\ncook.note = 'hot'\n", "stew"),
        # In place of them: DISH of the defaults is still required, and would be refused.
        ("cook.portions = 2\ncook.dish = 'soup'\n", "soup"),
    ],
)
def test_defaults_are_read_unless_the_files_set_all_that_is_needed(
    resolve, tmp_path, project, dish
):
    (tmp_path / "whole.gin").write_text(BASE)
    assert resolve(project, defaults=("whole.gin",)).function()[::2] == (dish, 2)


@pytest.mark.parametrize(
    "written",
    ["1e-5", "True", "'quoted'", "[1, 2]", "@SauceConfig()", "%DISH", "[%DISH, @SauceConfig()]"],
)
def test_what_gin_reads_stays_as_it_is(written):
    assert literal(written) == written


@pytest.mark.parametrize("written", ["models/first", "it's", "007", "[1, 2", "..."])
def test_bare_strings_are_quoted(written):
    assert literal(written) == repr(written)


@pytest.mark.parametrize(
    ("line", "binding", "message", "fix"),
    [
        ("", "DISSH=pie", "macro DISSH is set, but nothing refers to it", "did you mean DISH?"),
        # PRETRAINED_LAYERS, the nearest of all commands' macros, would be refused as well.
        ("", "NUM_LAYERS=2", "macro NUM_LAYERS is set", "check the spelling, or remove it"),
        ("", "cook.dishh=pie", "cook has no parameter 'dishh'", "did you mean dish?"),
        ("", "cok.dish=pie", "unknown name 'cok", "did you mean cook?"),
        ("", "SauceConfg.amount=1", "unknown name 'SauceConfg", "did you mean SauceConfig?"),
        ("", "SauceConfig.amout=1", "SauceConfig has no parameter 'amout'", "mean amount?"),
        ("", "cook.sauce=@SauceConfg()", "SauceConfg", "did you mean SauceConfig?"),
        ("", "cook.note=%DISSH", "%DISSH is referred to but never given a value", "mean DISH?"),
        ("", "GarnishConfig.sauce=None", "`cook` never uses GarnishConfig.sauce", "fix:"),
        ("", "spicy/SauceConfig.amount=2", "never uses spicy/SauceConfig.amount", "fix:"),
        ("", "FLAVOUR=swet", "SauceConfig.flavour: 'swet' is not a choice", "mean sweet?"),
        ("", "SauceConfig.flavour=None", "SauceConfig.flavour: None", "'sweet' | 'salty'"),
        ("", "cook.portions=0", "cook: portions is 0", "an integer, 1 or more"),
        ("OTHER = 1\nGarnishConfig.sauce = %OTHER", "OTHER=2", "`cook` never uses OTHER", "fix:"),
        ("SauceConfg.amount = 1", "DISH=pie", "unknown name 'SauceConfg'", "fix:"),
        ("cook.note = 'unclosed", "DISH=pie", "base.gin", "fix:"),
        ("UNUSED = 1", "DISH=pie", "macro UNUSED is set, but nothing refers to it", "fix:"),
        ("A = %B\nB = %A\ncook.note = %A", "DISH=pie", "%A = %B = %A: macros that", "a value"),
        ("include 'a.gin'", "DISH=pie", "a.gin > b.gin > a.gin: a Gin file includes itself", ""),
        ("include 'runs/trian.gin'", "DISH=pie", "no such Gin file", "mean runs/train.gin?"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(resolve, line, binding, message, fix):
    with pytest.raises(ConfigError) as error:
        resolve(f"{BASE}{line}\n", "DISH=soup", binding).function()
    assert message in str(error.value)
    assert fix in str(error.value)


def test_where_no_macro_is_referred_to_none_is_expected(resolve):
    with pytest.raises(ConfigError, match=r"(?s)macro PIE is set.*expected: no macro here"):
        resolve("cook.dish = 'soup'\n", "PIE=1")


def test_required_values_are_all_named_with_how_to_set_them(resolve):
    fix = r"(?s)DISH, cook\.portions not set.*--gin\.DISH=\.\.\. --gin\.cook\.portions=\.\.\."
    with pytest.raises(ConfigError, match=fix):
        resolve(BASE + "cook.portions = %gin.REQUIRED\n")


def test_required_values_may_stay_open_where_allowed(resolve):
    resolved = resolve(BASE, allow_unset=True)
    assert resolved.unset == ("DISH",)
    assert resolved.function()[0] is None
    text = BASE + "X = %gin.REQUIRED\nSauceConfig.amount = %X\n"
    unset = resolve(text, "DISH=soup", allow_unset=True)
    with pytest.raises(ConfigError, match=r"SauceConfig\.amount = %X: not set"):
        unset.function()


def test_paths_begin_at_home(resolve, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve(BASE, "DISH=~/soup").function()[0] == "/home/me/soup"
    assert at_home({"~/a": ["~", ("~/b", 1)]}) == {"/home/me/a": ["/home/me", ("/home/me/b", 1)]}
    assert at_home("~a/b ~/c") == "~a/b ~/c"


def test_included_files_are_found_without_noise(resolve, tmp_path, monkeypatch, caplog, capfd):
    """A working directory with a folder `models/` is a namespace package to Python."""
    (tmp_path / "models").mkdir()
    (tmp_path / "gin" / "models").mkdir(parents=True)
    (tmp_path / "gin" / "models" / "salty.gin").write_text("FLAVOUR = 'salty'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = BASE.replace("FLAVOUR = 'sweet'", "include 'models/salty.gin'")
    with caplog.at_level(logging.DEBUG):
        resolved = resolve(text, "DISH=soup", search_paths=(str(tmp_path / "gin"),))
    assert resolved.function()[1].flavour is Flavour.SALTY
    assert "Path not found" not in caplog.text + capfd.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "portions", "note"),
    [
        ("include 'defaults.gin'\nPORTIONS = 4", 4, ""),
        # An include wins over the lines above it, and fills in what is required.
        ("PORTIONS = 4\ninclude 'defaults.gin'", 3, ""),
        ("include 'command.gin'\ninclude 'party.gin'", 6, "oat"),
        # A scope's bindings are its own.
        ("include 'defaults.gin'\nhot/cook.note = 'corn'\ninclude 'party.gin'", 6, "oat"),
        # The macro is referred to, even if by a line that another replaces.
        ("include 'defaults.gin'\ncook.portions = 5", 5, ""),
    ],
)
def test_which_binding_wins(resolve, recipe, portions, note):
    assert resolve(f"{BASE}{recipe}\n", "DISH=pie").function()[2:] == (portions, note)


def bake(*, tin: Pretrained | str | None = None, minutes: int = 30):
    return tin


def test_pretrained_weights_that_nothing_loads_are_refused(resolve):
    weights = "PRETRAINED = 'bert'\nbake.tin = @Pretrained()\nPretrained.source = %PRETRAINED\n"
    assert resolve(weights, function=bake).function() == Pretrained("bert")
    for given in ([f"{weights}bake.tin = None\n"], ["bake.minutes = 5\n", "PRETRAINED=bert"]):
        with pytest.raises(ConfigError, match=r"nothing loads it: .* from random weights"):
            resolve(*given, function=bake)


def plate(*, garnish: GarnishConfig):
    return garnish


def test_a_scope_reaches_what_its_references_are_made_of(resolve):
    text = "plate.garnish = @mild/GarnishConfig()\nGarnishConfig.sauce = @SauceConfig()\n"
    text += "SauceConfig.amount = 2.0\nhot/SauceConfig.amount = 9.0\n"
    resolved = resolve(text, "mild/SauceConfig.flavour=salty", function=plate)
    assert resolved.function() == GarnishConfig(SauceConfig(Flavour.SALTY, amount=2.0))
    assert resolved.unused == ("hot/SauceConfig.amount",)
    with pytest.raises(ConfigError, match=r"hot/SauceConfig\.flavour"):
        resolve(text, "hot/SauceConfig.flavour=salty", function=plate)


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, -1], ["3", 3.0, True, None]),
        (float, [3, 0.5], ["0.5", True]),
        (str, ["a"], [1, ["a"]]),
        (bool, [True], [1, "True"]),
        (int | None, [None, 2], ["2"]),
        (Sequence[str], [["a"], ("a", "b"), []], ["faq", [1], {"a": 1}]),
        (tuple[int, ...], [[1, 2], (1,)], [[1, "2"], "12", 3]),
        (tuple[int, str], [(1, "a")], [(1,), ("a", 1)]),
        (Mapping[str, int], [{"query": 32}, {}], [128, {"query": "32"}, {1: 2}, ["query"]]),
        (str | Sequence[str], ["a", ["a"]], [1]),
        (Mapping[str, str | Mapping[str, str]], [{"t": "p"}, {"t": {"s": "p"}}], [{"t": 1}, "p"]),
        (str | os.PathLike[str], ["a"], [1]),
        (Literal["a", "b"], ["a"], ["c"]),
        (SauceConfig | None, [SauceConfig(), None], ["part", SauceConfig]),
        (Sequence[tuple[str, Flavour]], [[("a", "sweet")]], [[("a", "sour")], [("a", None)]]),
        (object, [1, "a", None], []),
    ],
)
def test_what_an_annotation_allows(hint: object, good: list[object], bad: list[object]):
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


def test_annotations_and_what_to_write():
    assert shown(Mapping[str, int] | None) == "Mapping[str, int] | None"
    assert shown(str | os.PathLike[str]) == "str | PathLike[str]"
    assert shown(Sequence[Flavour] | None) == "Sequence['sweet' | 'salty'] | None"
    assert shown(Literal[1, 2] | None) == "Literal[1, 2] | None"
    assert (shown(SauceConfig | None), shown(int)) == ("SauceConfig | None", "int")
    assert fix_of("faq", Sequence[str] | None) == "write ['faq']"
    assert fix_of("good", Mapping[str, str]) == "write {'good': 'good'}"
    assert fix_of(3, Mapping[str, str]) is None
    # What a shell makes of --gin.TASKS=['faq'].
    assert fix_of("[faq]", Sequence[str]).startswith("quote all of it")
