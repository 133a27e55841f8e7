"""Fetching the peers, on small wheels made here: what is taken, kept, packed, and what is said when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.bench.implementation import Unsupported
from tests.bench.peers import fetch, flashinfer_build, flashinfer_link, flashinfer_runtime, pins, wheels
from tests.bench.peers.pins import PEERS
from tests.bench.peers.wheels import FetchError

SGLANG = PEERS["sglang"]


def make_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def sglang_wheel(folder: Path, *without: str) -> Path:
    files = {file: f"# {file}\n" for file in SGLANG.files if file not in without}
    other = {"sglang/__init__.py": "", "sglang/big.bin": "x" * 1000, "sglang-0.5.23.dist-info/licenses/LICENSE": "free"}
    return make_wheel(folder, f"sglang-{SGLANG.version}-py3-none-any.whl", files | other)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty .peers."""
    monkeypatch.setattr(pins, "ROOT", tmp_path)
    monkeypatch.setattr(pins, "FOLDER", tmp_path / ".peers")
    (tmp_path / ".peers").mkdir()
    return tmp_path / ".peers"


@pytest.fixture
def downloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """pip downloads the made wheel; the list says what it was asked for."""
    asked: list[str] = []

    def pip(*arguments: str | Path) -> None:
        asked.append(str(arguments[-1]))
        sglang_wheel(Path(arguments[arguments.index("--dest") + 1]))

    monkeypatch.setattr(wheels, "pip", pip)
    return asked


def test_only_the_needed_files_and_the_licence_are_taken(folder: Path, downloads: list[str]) -> None:
    fetch.fetch(SGLANG)
    assert downloads == [f"sglang=={SGLANG.version}"]
    there = sorted(str(path.relative_to(SGLANG.folder)) for path in SGLANG.folder.rglob("*") if path.is_file())
    assert there == sorted([*SGLANG.files, "sglang-0.5.23.dist-info/licenses/LICENSE"])
    entry = pins.manifest()["sglang"]
    assert entry["files"] == there and entry["version"] == SGLANG.version and len(entry["sha256"]) == 64
    assert not list(folder.rglob("*.whl")), "a wheel that is unpacked is not kept"


def test_what_is_there_is_not_fetched_again(folder: Path, downloads: list[str]) -> None:
    fetch.fetch(SGLANG)
    fetch.fetch(SGLANG)
    assert len(downloads) == 1
    (SGLANG.folder / SGLANG.files[0]).unlink()
    fetch.fetch(SGLANG)
    assert len(downloads) == 2 and (SGLANG.folder / SGLANG.files[0]).exists()
    fetch.write_manifest("sglang", {**pins.manifest()["sglang"], "version": "0.1"})
    fetch.fetch(SGLANG)
    assert len(downloads) == 3 and pins.manifest()["sglang"]["version"] == SGLANG.version


def test_a_wheel_of_an_interrupted_run_is_used(folder: Path, downloads: list[str]) -> None:
    sglang_wheel(folder / wheels.WHEELS / "3.12")
    fetch.fetch(SGLANG)
    assert downloads == []


def test_folders_are_taken_whole(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "a.whl", {"p/x/1.py": "", "p/x/y/2.py": "", "p/xz.py": "", "p/z.py": ""})
    assert wheels.unpack(wheel, ["p/x/", "p/z.py"], tmp_path / "out") == ["p/x/1.py", "p/x/y/2.py", "p/z.py"]


def test_errors_name_the_remedy(tmp_path: Path, folder: Path) -> None:
    wheel = sglang_wheel(tmp_path, SGLANG.files[1])
    with pytest.raises(FetchError, match=f"has no {SGLANG.files[1]}: tests/bench/peers/pins.py does not fit"):
        wheels.unpack(wheel, SGLANG.files, tmp_path / "out")
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(FetchError, match=r"cannot be read .* Remove it, then run the same command again"):
        wheels.unpack(wheel, SGLANG.files, tmp_path / "out")
    with pytest.raises(FetchError, match=r"failed with status 3; .* Do this.$"):
        wheels.run([sys.executable, "-c", "exit(3)"], "Do this.")


def test_a_failing_pip_ends_the_session_with_what_to_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="Check the network and the package index"):
        fetch.main(["sglang"])
    with pytest.raises(SystemExit):
        fetch.main(["sgland"])
    assert "no peer is called sgland; there are sglang, vllm, fla, flashinfer" in capfd.readouterr().err


def test_the_archive_holds_what_runs(folder: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(folder / "build", "left.o", {})
    fetch.main(["sglang"])
    cache = SGLANG.folder / "sglang" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_text("")
    with tarfile.open(fetch.pack()) as archive:
        names = sorted(archive.getnames())
    assert names == sorted([pins.MANIFEST, *(f"sglang/{file}" for file in pins.manifest()["sglang"]["files"])])
    monkeypatch.setattr(fetch, "ARCHIVE_LIMIT", 10.0)
    with pytest.raises(FetchError, match="build fewer shapes at once"):
        fetch.pack()


class Compiled:
    """What CuTe DSL's compilation returns, as far as the exporter uses it."""

    count = 0

    def export_to_c(self, path: str, function_name: str) -> None:
        Path(path).write_text(function_name)
        Compiled.count += 1


def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    Compiled.count = 0
    exporter = flashinfer_build.Exporter(tmp_path)
    assert exporter.export("a", Compiled)(1, 2) is None
    exporter.export("a", Compiled)
    exporter.export("b", Compiled)
    assert (Compiled.count, exporter.built) == (2, 2)

    again = flashinfer_build.Exporter(tmp_path)
    again.object_of(again.index["b"]).unlink()
    again = flashinfer_build.Exporter(tmp_path)
    again.export("a", Compiled)
    again.export("b", Compiled)
    assert (Compiled.count, again.built) == (3, 1)
    index = json.loads((tmp_path / flashinfer_runtime.INDEX).read_text())
    assert flashinfer_runtime.symbol_of(index, "a") == again.object_of(index["a"]).stem
    with pytest.raises(Unsupported, match=r"not compiled ahead of time .* run nox -s peers"):
        flashinfer_runtime.symbol_of(index, "c")


def test_a_compilation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def breaks() -> Compiled:
        raise MemoryError

    exporter = flashinfer_build.Exporter(tmp_path)
    with pytest.raises(MemoryError):
        exporter.export("a", breaks)
    assert flashinfer_build.Exporter(tmp_path).index == {}


@pytest.mark.parametrize(("text", "works"), (("", True), ("import a_library_that_was_left_out", False)))
def test_what_flashinfer_runs_with_is_imported_once(tmp_path: Path, text: str, works: bool) -> None:
    files = {"tvm_ffi/__init__.py": text, "tvm_ffi/lib/libtvm_ffi_testing.so": "the extension module links with it"}
    flashinfer_link.add_tvm_ffi(make_wheel(tmp_path, "a.whl", files), tmp_path / "site")
    assert (tmp_path / "site" / "tvm_ffi" / "lib" / "libtvm_ffi_testing.so").exists()
    with contextlib.nullcontext() if works else pytest.raises(FetchError, match="take it out of SPARED"):
        flashinfer_link.check_import(tmp_path / "site")


def test_tvm_ffi_of_several_pythons_share_a_folder(tmp_path: Path) -> None:
    for python in ("311", "312"):
        files = {
            f"tvm_ffi/core.cpython-{python}-x86_64-linux-gnu.so": "",
            "tvm_ffi/include/a.h": "",
            "tvm_ffi/b.py": "",
        }
        flashinfer_link.add_tvm_ffi(make_wheel(tmp_path, f"{python}.whl", files), tmp_path / "site")
    there = sorted(os.listdir(tmp_path / "site" / "tvm_ffi"))
    assert there == ["b.py", *(f"core.cpython-{python}-x86_64-linux-gnu.so" for python in ("311", "312"))]
