"""Which binding wins."""

import pytest

from taser_jax.cli import configuration
from taser_jax.cli.configuration import GinFlags
from taser_jax.interop.pretrained import Pretrained
from taser_jax.storage.errors import ConfigError


def bake(*, bread: str = "rye", minutes: int = 30, tin: Pretrained | str | None = None):
    return bread, minutes, tin


@pytest.fixture
def resolve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*files, bindings=(), **texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.gin").write_text(text)
        flags = GinFlags(files=tuple(f"{name}.gin" for name in files), bindings=bindings)
        return configuration.resolve(bake, flags=flags).function()

    return call


DEFAULTS = "MINUTES = 30\nbake.minutes = %MINUTES\n"


def test_own_lines_win_over_what_is_included(resolve):
    recipe = "include 'defaults.gin'\nMINUTES = 45\n"
    assert resolve("recipe", defaults=DEFAULTS, recipe=recipe)[1] == 45


def test_an_include_fills_in_what_is_required(resolve):
    command = "MINUTES = %gin.REQUIRED\nbake.minutes = %MINUTES\n"
    recipe = "include 'command.gin'\ninclude 'long.gin'\n"
    assert resolve("recipe", command=command, recipe=recipe, long="MINUTES = 60\n")[1] == 60


def test_an_include_wins_over_the_lines_above_it(resolve):
    recipe = "MINUTES = 45\ninclude 'defaults.gin'\n"
    assert resolve("recipe", defaults=DEFAULTS, recipe=recipe)[1] == 30


def test_scopes_are_bindings_of_their_own(resolve):
    other = "hot/bake.minutes = 5\nbake.bread = 'oat'\n"
    recipe = "include 'defaults.gin'\nhot/bake.bread = 'corn'\ninclude 'other.gin'\n"
    assert resolve("recipe", defaults=DEFAULTS, recipe=recipe, other=other) == ("oat", 30, None)


def test_a_file_that_includes_itself_is_refused(resolve):
    with pytest.raises(ConfigError, match=r"a.gin > b.gin > a.gin: a Gin file includes itself"):
        resolve("a", a="include 'b.gin'\n", b="include 'a.gin'\n")


def test_pretrained_weights_that_nothing_loads_are_refused(resolve):
    weights = "PRETRAINED = 'bert'\nbake.tin = @Pretrained()\nPretrained.source = %PRETRAINED\n"
    assert resolve("recipe", recipe=weights)[2] == Pretrained("bert")
    with pytest.raises(ConfigError) as error:
        resolve("recipe", "over", recipe=weights, over="bake.tin = None\n")
    assert "nothing loads it: this would start from random weights" in str(error.value)
    with pytest.raises(ConfigError, match="PRETRAINED is set, but nothing loads it"):
        resolve("recipe", bindings=(("PRETRAINED", "bert"),), recipe=DEFAULTS)


def test_a_macro_is_referred_to_even_where_a_later_line_binds_directly(resolve):
    assert resolve("recipe", recipe=f"{DEFAULTS}bake.minutes = 5\n")[1] == 5
