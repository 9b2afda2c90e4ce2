"""`ckpt` reads files: it starts no jax, works where there is no device, and says what is wrong with a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxdiffusion.cli.main import main
from tests.pipelines.test_checkpoint_folder import make

LEAF = {"dtype": "float32", "shape": [2, 3], "axes": [["data", "fsdp"], None]}
BUCKETS = [
    {"size": [32, 32], "samples": 30, "epoch": 1, "place": 2},
    {"size": [24, 40], "samples": 10, "epoch": 1, "place": 6},
]
TOLD = {
    "format": 1,
    "step": 6,
    "written": 1.0e9,
    "versions": {"maxdiffusion": "0.1.0", "jax": "0.10.2"},
    "parameters": 6,
    "mesh": {"axes": {"data": 4, "fsdp": 1}, "devices": 4, "device_kind": "TPU v5e", "platform": "tpu", "processes": 1},
    "parts": {"params": {"dense/kernel": LEAF}},
    "model": "pictures",
    "recipe": {"train.steps": 6},
    "rules": [["embed", ["fsdp"]], ["heads", "tensor"]],
    "data": {"seed": 0, "batch_size": 8, "num_samples": 40, "next_sample": 48, "epoch": 1, "buckets": BUCKETS},
    "files": {"params/_METADATA": 5, "params/manifest.ocdbt": 5},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make(tmp_path, 3, manifest=False)
    (make(tmp_path, 6) / "checkpoint.json").write_text(json.dumps(TOLD))
    (tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp-2").mkdir()
    return tmp_path


def test_ls_is_a_table_or_one_object(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    assert "of an older version, which did not write down shapes" in out
    assert "data=4 (4 x TPU v5e)" in out and "float32 (1)" in out
    assert "step 9 was begun and is not finished" in out
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["whole"], one["parameters"]) for one in told["checkpoints"]] == [
        (3, True, None),
        (6, True, 6),
    ]
    assert told["unfinished"] == [9]
    assert told["checkpoints"][1]["parts"]["params"] == {
        "bytes": 10,
        "arrays": 1,
        "elements": 6,
        "dtypes": {"float32": 1},
    }


def test_show_tells_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(run), "--all"]) == 0
    out = capsys.readouterr().out
    assert "sample 48 is next, in epoch 1 of 40 samples" in out
    assert "32 x 32: 2 of 30 drawn in epoch 1" in out and "24 x 40: 6 of 10 drawn in epoch 1" in out
    assert "embed: fsdp, heads: tensor" in out
    assert "params/dense/kernel" in out and "data+fsdp -" in out
    assert main(["ckpt", "show", f"{run}@6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"] == TOLD


def test_a_flaw_is_told_and_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "6" / "params" / "_METADATA").unlink()
    assert main(["ckpt", "ls", str(run)]) == 1
    assert "no: params/_METADATA is missing" in capsys.readouterr().out
    assert main(["ckpt", "show", str(run)]) == 1
    assert "no: params/_METADATA is missing" in capsys.readouterr().out


def test_a_wrong_place_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: there is no folder")


def test_no_jax_is_imported(run: Path) -> None:
    code = (
        "import sys; from maxdiffusion.cli.main import main; "
        "status = [main(['ckpt', 'ls', sys.argv[1]]), main(['ckpt', 'show', sys.argv[1]])]; "
        "assert status == [0, 0], status; assert 'jax' not in sys.modules and 'orbax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        env={**os.environ, "JAX_PLATFORMS": "none_there"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
