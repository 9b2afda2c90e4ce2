"""Every Python block of the README and the docs runs, top to bottom, on eight virtual devices.

A fence `python raises X` must raise X; a fence of any other language is not run.
"""

from __future__ import annotations

import builtins
import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer

from maxdiffusion import errors
from maxdiffusion.cli.main import app
from maxdiffusion.common_types import BlockSizes
from maxdiffusion.config.load import load_recipe
from maxdiffusion.models.registry import MODELS
from maxdiffusion.parallel.rules import LOGICAL_AXES

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[tuple[int, str, str]]:
    text = page.read_text()
    return [(text[: m.start()].count("\n") + 2, m.group(1).strip(), m.group(2)) for m in _FENCE.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "snippet"}
    for line, info, code in _blocks(page):
        program = compile("\n" * (line - 1) + code, str(page), "exec")
        if not info:
            exec(program, scope)
            continue
        kind, _, name = info.partition(" ")
        assert kind == "raises", f"{page.name}:{line}: unknown fence 'python {info}'"
        expected = getattr(errors, name, None) or getattr(builtins, name)
        with pytest.raises(expected):
            exec(program, scope)


def _commands() -> list[list[str]]:
    """The words of each command line of ours on a page, without its comment."""
    texts = (page.read_text() for page in PAGES)
    return [
        shlex.split(line, comments=True)[1:] for text in texts for line in re.findall("^maxdiffusion .*", text, re.M)
    ]


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_commands_have_these_options(words: list[str]) -> None:
    """Each verb reads its words, `train` its recipe with the changes; nothing runs."""
    verbs, name = typer.main.get_command(app), "maxdiffusion"
    while hasattr(verbs, "commands"):
        name, *words = words
        verbs = verbs.commands[name]  # type: ignore[attr-defined]
    read = verbs.make_context(name, words).params
    if name == "train" and not read["recipe"].endswith(".yaml"):  # a file of the reader's
        load_recipe(read["recipe"], read["changes"] or ())


def _scripts() -> list[tuple[str, str]]:
    """Each script of the repository that a page runs, and its options."""
    texts = (page.read_text() for page in PAGES)
    return sorted(
        {found for text in texts for found in re.findall(r"python ((?:benchmarks|scripts)/\S+\.py)([^`\n]*)", text)}
    )


@pytest.mark.parametrize(("script", "options"), _scripts(), ids=" ".join)
def test_scripts_have_these_options(script: str, options: str) -> None:
    text = (ROOT / script).read_text()
    for option in re.findall(r"--[\w-]+", options):
        assert f'"{option}"' in text


def test_the_table_of_logical_axes_is_the_code_s():
    text = (ROOT / "docs" / "parallelism.md").read_text()
    for name, meaning in LOGICAL_AXES.items():
        assert f"| `{name}` | {meaning} |" in text


def test_the_table_of_models_is_the_registry_s():
    text = (ROOT / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*\| ([^|]+) \|$", text, re.MULTILINE))
    assert rows == {name: spec.license for name, spec in MODELS.items()}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_block_size_has_its_row():
    """The seven sizes, and those of splash attention, which are called alike."""
    page = (ROOT / "docs" / "parallelism.md").read_text()
    section = page.split("## Block sizes of flash attention")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(block_\w+)` \|(.+)\|(.+)\|(.+)\|$", section, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(field.name for field in dataclasses.fields(BlockSizes))
    for name, splash, *_ in rows:
        wanted = "runs as 1" if name == "block_b" else f"`{name.replace('block_k', 'block_kv')}`"
        assert wanted in splash
