"""Table 4 at toy size: one training per β, resumed where it is done."""

import pytest
from script_calls import load_script

from taser_jax.training.checkpoints import Checkpoints

pytestmark = pytest.mark.slow


def run(store_dir, output_dir, *betas):
    options = "--steps 4 --period 2 --batch_size 16 --layers 1 --embed_dim 32 --num_batches 2"
    where = [f"--token_store={store_dir}", f"--output_dir={output_dir}"]
    load_script("commitment.py").main([*where, *options.split(), "--betas", *betas])
    return (output_dir / "table.md").read_text().splitlines()


@pytest.mark.release
def test_one_training_per_beta_and_finished_ones_are_read(tiny_store_dir, tmp_path, monkeypatch):
    saved: list[int] = []
    save = Checkpoints.save

    def count(self, *arguments, **options):
        saved.append(options["step"])
        return save(self, *arguments, **options)

    monkeypatch.setattr(Checkpoints, "save", count)
    lines = run(tiny_store_dir, tmp_path, "0")
    assert saved == [2, 4]
    assert lines[0] == "| steps | β = 0 | noise |"
    assert lines[2].startswith("| 2 to 4 |")
    lines = run(tiny_store_dir, tmp_path, "0", "0.9")
    assert saved == [2, 4, 2, 4]
    assert lines[0] == "| steps | β = 0 | noise | β = 0.9 | noise |"
    cells = lines[2].split("|")[2:-1]
    assert len(cells) == 4
    assert all(0 <= float(rate) <= 100 for rate in cells[::2])
    assert lines[-1].startswith("| validation MRR | 0.")
    page = (tmp_path / "analysis" / "analysis.md").read_text()
    assert lines[2] in page.splitlines()
