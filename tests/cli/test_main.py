"""Exit statuses, error lines, help, and that help costs no jax."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maxdiffusion import __version__
from maxdiffusion.cli.main import main

VERBS = ("train", "generate", "evaluate", "explain", "recipes")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "error: No such command 'trian'. Did you mean 'train'?"),
        (["train"], "error: Missing argument 'RECIPE'."),
        (["train", "pictures", "--print-confg"], "error: No such option: --print-confg"),
        (["train", "picturs"], "error: recipe 'picturs' is unknown: did you mean 'pictures'?"),
        (["train", "pictures", "--virtual-devices", "0"], "error: Invalid value for '--virtual-devices'"),
        (["--versio"], "error: No such option: --versio"),
    ],
)
def test_wrong_usage_is_one_line_on_standard_error_and_status_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


def test_several_mistakes_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "pictures", "learning_rate=1", "train.steps=many"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"maxdiffusion {__version__}\n"


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS)])
def test_help_says_what_each_verb_does(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Usage:" in out
    if not words:
        assert all(verb in out for verb in VERBS)


def test_no_verb_shows_the_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage:" in capsys.readouterr().out


def test_help_and_print_config_import_no_jax() -> None:
    program = (
        "import sys; from maxdiffusion.cli.main import main; "
        "main(['--help']); main(['train', 'pictures-demo', '--print-config']); main(['recipes']); "
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'optax', 'orbax', 'grain')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_the_package_is_the_program() -> None:
    """`python -m maxdiffusion` has the words, streams and exit statuses of `maxdiffusion`."""

    def run(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "maxdiffusion", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert run("--version") == (0, f"maxdiffusion {__version__}\n", "")
    assert run("trian") == (2, "", "error: No such command 'trian'. Did you mean 'train'?\n")


def test_ctrl_c_ends_the_process_while_programs_run() -> None:
    """A device still works when Python would close down: it would be waited for, or XLA would abort with a message."""
    program = (
        "import sys, jax, jax.numpy as jnp; from maxdiffusion.cli import main as module\n"
        "busy = jax.jit(lambda x: jax.lax.fori_loop(0, 10**7, lambda i, x: jnp.sin(x @ x), x))\n"
        "def verb(**_):\n"
        "    busy(jnp.ones((256, 256)))\n"
        "    raise KeyboardInterrupt\n"
        "module.app = verb\n"
        "module.run()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
