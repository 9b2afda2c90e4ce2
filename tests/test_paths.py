"""Addresses of object stores become paths with pathlib's methods, and a missing package names itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path, as_text, is_remote, write_whole


def test_local_paths_are_pathlib_s(tmp_path: Path) -> None:
    assert as_path("runs/x") == Path("runs/x") and isinstance(as_path("runs/x"), Path)
    assert as_text("runs/x") == str(Path.cwd() / "runs" / "x")
    assert not is_remote(as_path(tmp_path))


@pytest.mark.parametrize(("kind", "package"), [("gs", "gcsfs"), ("s3", "s3fs"), ("az", "adlfs")])
def test_a_missing_package_names_itself(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(name: str) -> None:
        raise ImportError(f"Please install {package}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(UsageError, match=f"'{kind}://bucket/x' needs the package {package}: pip install {package}"):
        as_path(f"{kind}://bucket/x")
    with pytest.raises(UsageError, match="needs the package"):
        as_path(Path(f"{kind}://bucket/x"))  # pathlib makes one slash of the two


def test_an_unknown_store_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no store is called 'gss://': did you mean 'gs'\?"):
        as_path("gss://bucket/x")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    write_whole(path, "old\n")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "new, and half of it is written when the process dies\n")
    assert path.read_text() == "old\n"
    write_whole(path, "new\n")
    assert path.read_text() == "new\n"
