"""The sdist builds; the wheel from it has every file, and commands run from the wheel alone."""

import os
import shutil
import subprocess
import sys

import pytest
from script_calls import REPOSITORY

pytestmark = pytest.mark.release


def build(kind, source, destination):
    """Builds an sdist or a wheel of `source` without a network; returns its path."""
    destination.mkdir()
    program = f"import setuptools.build_meta as b; b.build_{kind}({str(destination)!r})"
    subprocess.run(
        [sys.executable, "-c", program], cwd=source, check=True, capture_output=True, timeout=300
    )
    (archive,) = destination.iterdir()
    return archive


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The content of the wheel that was built from the sdist of the tracked files."""
    root = tmp_path_factory.mktemp("package")
    tracked, checkout, site = root / "tracked.tar", root / "checkout", root / "site"
    subprocess.run(["git", "archive", "HEAD", f"--output={tracked}"], cwd=REPOSITORY, check=True)
    shutil.unpack_archive(tracked, checkout, filter="data")
    sdist = build("sdist", checkout, root / "sdist")
    shutil.unpack_archive(sdist, root / "unpacked", filter="data")
    (unpacked,) = (root / "unpacked").iterdir()
    shutil.unpack_archive(build("wheel", unpacked, root / "wheel"), site, "zip")
    return checkout, site


def test_the_wheel_has_every_module_recipe_and_page(installed):
    checkout, site = installed

    def files(folder, *suffixes):
        return {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.suffix in suffixes
        }

    package = site / "taser_jax"
    recipes = files(checkout / "gin_configs", ".gin")
    assert len(recipes) > 40
    assert files(package / "gin_configs", ".gin") == recipes
    assert files(package / "tasks", ".py") == files(checkout / "tasks", ".py")
    kinds = (".py", ".html", ".template")
    own = files(checkout / "taser_jax", *kinds)
    assert {name for name in files(package, *kinds) if not name.startswith("tasks/")} == own


def test_commands_run_from_the_wheel(installed, tmp_path):
    _, site = installed
    alone = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path)}
    program = "import taser_jax; print(taser_jax.__file__); from taser_jax.cli.main import run; "
    for arguments, told in (
        (["--show_gin", "models/taser.gin"], "ExpertConfig"),
        (["train", "--help"], "Trains a dual encoder"),
        (["prepare", "pydocs", f"--gin.DATA_DIR={str(tmp_path / 'data')!r}"], ""),
    ):
        done = subprocess.run(
            [sys.executable, "-c", f"{program}raise SystemExit(run({arguments!r}))"],
            cwd=tmp_path,
            env=alone,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout.startswith(str(site))
        assert told in done.stdout
    assert list((tmp_path / "data/pydocs").glob("passages*"))
