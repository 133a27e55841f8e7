"""The wheel: what is in it, and that it works alone and beside the other distribution that installs `kernels`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house import CPU_CALL

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("integration", "kernels", "reference")


def python(*args: str, cwd: Path, path: Path | None = None) -> str:
    """stdout of an interpreter that sees `path` and the installed packages, but not this checkout."""
    installed = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), *installed])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("build") / "tree"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    return Path(shutil.copytree(ROOT, copy, ignore=unwanted))


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree.parent), str(tree), cwd=tree.parent)
    (wheel,) = tree.parent.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where only this wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_holds_three_rooms_and_nothing_else(tree: Path, site: Path) -> None:
    packed = {path for path in files(site) if ".dist-info/" not in path}
    assert packed == {path for path in files(tree) if path.split("/")[0] in ROOMS}
    assert {"kernels/runtime.py", "kernels/verify/__init__.py", "kernels/verify/chunk.py"} <= packed
    assert {"reference/__init__.py", "integration/__init__.py"} <= packed
    assert {path for path in packed if path.endswith("py.typed")} >= {
        "kernels/verify/py.typed",
        "reference/py.typed",
        "integration/py.typed",
    }


def test_kernels_is_a_namespace_portion(site: Path) -> None:
    """An __init__.py of ours would overwrite the other distribution's."""
    assert not (site / "kernels" / "__init__.py").exists()


def test_metadata(site: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(site)])
    meta = found.metadata
    assert meta["Name"] == "hopper-gdn"
    assert meta["License-Expression"] == "MIT"
    assert meta.get_all("License-File") == ["LICENSE"]
    (licence,) = site.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    assert meta.get_payload() == (ROOT / "README.md").read_text()  # type: ignore[attr-defined]
    requirements = found.requires or []
    assert {requirement.split(">")[0].split("<")[0] for requirement in requirements} == {"torch", "tilelang"}


def test_it_runs_alone(site: Path, tmp_path: Path) -> None:
    where = "import integration, kernels.runtime, reference\nprint(verify.__file__, kernels.runtime.__file__)"
    places = python("-c", f"{CPU_CALL}\n{where}", cwd=tmp_path, path=site).split()
    assert places == [str(site / "kernels" / "verify" / "__init__.py"), str(site / "kernels" / "runtime.py")]


def test_it_runs_beside_a_regular_package_of_that_name(site: Path, tmp_path: Path) -> None:
    """Wheels share one directory, so the other's kernels/__init__.py becomes the parent of kernels.verify."""
    merged = Path(shutil.copytree(site, tmp_path / "site"))
    (merged / "kernels" / "__init__.py").write_text("from kernels.other import NAME\n")
    (merged / "kernels" / "other.py").write_text("NAME = 'another distribution'\n")
    script = f"{CPU_CALL}\nimport kernels\nprint(kernels.NAME, verify.__file__, sep='|')"
    name, place = python("-c", script, cwd=tmp_path, path=merged).split("|")
    assert name == "another distribution"
    assert place == str(merged / "kernels" / "verify" / "__init__.py")
