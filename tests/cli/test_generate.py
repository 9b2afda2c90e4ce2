"""`generate` checks the run and its own options before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxdiffusion.cli.main import main
from maxdiffusion.config import show
from maxdiffusion.config.load import RUN_RECIPE, load_recipe
from tests.pipelines.test_checkpoint_folder import make


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures-demo"
    folder.mkdir()
    (folder / RUN_RECIPE).write_text(show.as_yaml(load_recipe("pictures-demo").recipe), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--solver", "eulr"], "sample.solver='eulr' (command line): did you mean 'euler'?"),
        (["--steps", "0"], "sample.steps=0 (command line): write a whole number, 1 or more"),
        (["--guidance-scale", "-1"], "sample.guidance_scale=-1.0 (command line): write a number, 0 or more"),
        (["--mesh", "dtaa=2"], "mesh.dtaa (command line) is unknown: did you mean 'mesh.data'?"),
        (["--mesh", "data"], "mesh=data (command line): mesh 'data' is not AXIS=SIZE"),
        (["quantization=int9"], "quantization='int9' (command line): did you mean 'int8'?"),
        (["quantisation=int8"], "quantisation (command line) is unknown: did you mean 'quantization'?"),
        (["-n", "0"], "Invalid value for '-n'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
    ],
)
def test_a_wrong_option_is_one_line(
    words: list[str], cause: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a red apple", "--from", str(run), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {cause}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "fox,", "noto"], 'the prompt came as 3 words: put it in quotes: maxdiffusion generate "a fox, noto"'),
        (["  "], 'the prompt is empty: say what to see, such as maxdiffusion generate "a fox, noto style"'),
        (["x", "--from", "no-such-run"], "there is no run 'no-such-run': "),
        (["x", "--from", "pictures-64@4700"], "the packaged model 'pictures-64' has one set of weights and no steps"),
    ],
)
def test_what_newcomers_write_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *words, "--steps", "1"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"error: {told}")
    assert "--from" not in words or "pictures-64" in err


def test_a_missing_run_gets_the_nearest_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--from", str(run.parent / "pictures-dem")]) == 2
    assert "did you mean 'pictures-demo'?" in capsys.readouterr().err
    for step in (3, 6):
        make(run, step)
    assert main(["generate", "x", "--from", f"{run}@5"]) == 2
    assert "has no checkpoint of step 5: it has those of 3 and 6\n" in capsys.readouterr().err
