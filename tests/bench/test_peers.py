"""The peers' adapters: who is there, who says that it is not, and whether what runs is right."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import check
from tests.bench.implementation import Unsupported
from tests.bench.peers import fla, flashinfer_entries, found, peers, pins, seed, sglang, stand_ins, vllm
from tests.bench.peers.entry import Entry
from tests.bench.peers.pins import PEERS, Peer
from tests.bench.peers.triton_check import ENTRIES, POOLS
from tests.bench.problem import OPS, Problem, Shape
from tests.gate_engine import Evidence

CPU = torch.device("cpu")
NAMES = {
    "sglang": ("triton-verify", "triton-verify-no-pdl", "triton-fused", "triton-packed", "snapshot-scatter"),
    "vllm": ("triton-spec", "triton-packed", "cuda-fused-mtp"),
    "fla": ("fused-recurrent",),
    "flashinfer": (
        *("decode", "mtp-intermediates", "mtp-outputs", "wy-output-only", "mtp-recover", "ring-flush"),
    ),
    "flashqla": ("gated", "auto", "decode"),
}  # fmt: skip


def run_module(module: str, *arguments: str, **environment: str) -> Any:
    """The JSON that a module of this package prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.bench.peers.{module}", *arguments],
        cwd=pins.ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No peer is installed, and the folder for unpacked ones, which is returned, is empty."""
    monkeypatch.setattr(found, "_installed", lambda peer: None)
    monkeypatch.setattr(pins, "FOLDER", tmp_path)
    found.modules.cache_clear()
    yield tmp_path
    found.modules.cache_clear()


@pytest.mark.criterion("7.2")
def test_every_entry_is_listed() -> None:
    listed = peers()
    assert len({i.name for i in listed}) == len(listed)
    by_peer: dict[str, list[str]] = {}
    for implementation in listed:
        matched = re.fullmatch(r"(\w+)-([\w.+]+)/([\w-]+)", implementation.name)
        assert matched, implementation.name
        by_peer.setdefault(matched[1], []).append(matched[3])
        assert implementation.ops and implementation.ops <= set(OPS)
    assert by_peer == {peer: list(entries) for peer, entries in NAMES.items()}


def test_versions_agree_with_the_constraints() -> None:
    """A package that the environment installs too is the version that the benchmark fetches."""
    lines = (pins.ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    both = {peer.package: peer.version for peer in PEERS.values() if peer.package in pinned}
    assert both == {package: pinned[package] for package in both} and "fla-core" in both


@pytest.mark.criterion("7.2")
def test_listing_imports_neither_triton_nor_a_peer_and_touches_no_gpu() -> None:
    program = (
        "import sys, torch; from tests.bench.peers import peers; peers(); import tests.bench.peers.flashinfer_worker; "
        "heavy = {'triton', 'tilelang', 'sglang', 'vllm', 'fla', 'flashinfer', 'cutlass', 'tvm_ffi'}; "
        "print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=pins.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


@pytest.mark.criterion("7.2")
def test_what_is_not_here_says_so_and_how_to_get_it(nothing_installed: Path) -> None:
    for implementation in peers():
        absent = implementation.absent()
        assert absent.startswith("not here: "), implementation.name
        remedy = {"cuda-fused-mtp": "install vllm=="}.get(implementation.name.partition("/")[2], "nox -s peers")
        assert ("--seed-checkout" if "flashqla" in implementation.name else remedy) in absent, absent


@pytest.mark.criterion("7.2")
def test_other_versions_and_broken_packages_are_not_taken(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer("made", "made-core", "2.0", modules=("made.a.b",), files=("made/a/b.py",))
    monkeypatch.setitem(PEERS, "made", peer)
    file = nothing_installed / "made" / "made" / "a" / "b.py"
    file.parent.mkdir(parents=True)
    file.write_text("import a_module_that_is_nowhere\n")
    manifest = nothing_installed / pins.MANIFEST
    manifest.write_text(json.dumps({"made": {"version": "1.0"}}))
    assert found.absence("made") == "not here: install made-core==2.0, or run nox -s peers -- made"
    manifest.write_text(json.dumps({"made": {"version": "2.0"}}))
    assert "does not import: ModuleNotFoundError: No module named 'a_module_that_is_nowhere'" in found.absence("made")


def test_unpacked_files_load_without_their_package(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer("made", "made-core", "2.0", modules=("made.a.b",), files=("made/a/b.py", "made/a/c.py"))
    monkeypatch.setitem(PEERS, "made", peer)
    folder = peer.folder / "made" / "a"
    folder.mkdir(parents=True)
    (peer.folder / "made" / "__init__.py").write_text("raise RuntimeError('the heavy package')\n")
    (folder / "b.py").write_text("from made import __version__\nfrom made.far.away import fact\nfrom .c import C\n")
    (folder / "c.py").write_text("C = 3\n")
    (module,) = found.load_unpacked("made", {"made.far": {}, "made.far.away": {"fact": 42}})
    assert (module.__version__, module.fact, module.C) == ("2.0", 42, 3)
    assert not [name for name in sys.modules if name.partition(".")[0] == "made"]


def test_stand_ins_tell_the_truth_about_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(capability: tuple[int, int], cuda: str | None) -> tuple[bool, bool, bool]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        sg = stand_ins.of("sglang")
        pdl = sg["sglang.kernels.jit.utils"]["is_arch_support_pdl"]()
        return sg["sglang.srt.utils"]["is_sm90_supported"](), pdl, sg["sglang.srt.utils"]["is_cuda"]()

    assert facts((9, 0), "13.0") == (True, True, True)
    assert facts((9, 0), "12.1") == (False, True, True)
    assert facts((10, 0), "13.0") == (False, True, True)
    assert facts((8, 0), "12.4") == (False, False, True)
    assert facts((0, 0), None) == (False, False, False)


@pytest.mark.criterion("7.2")
@pytest.mark.parametrize(
    ("entry", "shape", "reason"),
    (
        (fla.Recurrent, Shape("verify-snapshots", 1, 2, 1, 1), "keeps no per-token states"),
        (fla.Recurrent, Shape("decode-dense", 1, 1, 1, 1), "pool is bf16, supported: fp32"),
        (sglang.PackedDecode, Shape("decode", 1, 2, 1, 1), "T is 2, supported: 1"),
        (vllm.FusedMtp, Shape("verify-snapshots", 1, 12, 1, 1), "T is 12, supported: 1, 2"),
        (flashinfer_entries.Decode, Shape("decode", 1, 1, 1, 1, "fp32"), "pool is fp32, supported: bf16"),
        (flashinfer_entries.WyOutputs, Shape("verify-replay", 1, 17, 1, 1), "T is 17, supported: 1, 2"),
        (flashinfer_entries.RingFlush, Shape("ring", 1, 12, 1, 1), "T is 12, supported: 4, 8"),
    ),
)
def test_shapes_outside_a_peer_are_refused(entry: type[Entry], shape: Shape, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        entry().bind(Problem(shape, CPU, l2_bytes=1))


@pytest.mark.criterion("7.2")
def test_the_seed_is_named_by_its_commit(tmp_path: Path) -> None:
    assert seed.Verify(None).absent() == "not here: no checkout of it was named (--seed-checkout)"
    assert seed.Verify(tmp_path).name == "flashqla-checkout/gated"
    assert seed.Verify(tmp_path).absent() == "not here: the folder named by --seed-checkout has no flash_qla/"
    assert seed.Verify(tmp_path / "FlashQLA-066a214f00d").name == "flashqla-066a214/gated"
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path))
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert re.fullmatch(r"flashqla-[0-9a-f]{7,}/auto", seed.Auto(tmp_path).name)
    (tmp_path / "flash_qla").mkdir()
    assert seed.Verify(tmp_path).absent().startswith("not here: flash_qla does not import: ModuleNotFoundError")


@pytest.mark.criterion("7.7")
@pytest.mark.parametrize("peer", ENTRIES)
def test_their_kernels_equal_fp64(peer: str, evidence: Evidence) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: the peers' kernels cannot run")
    if missing := found.missing(peer):
        pytest.skip(missing)
    results = run_module("triton_check", peer)
    wanted = {f"{entry().name} {op} {pool}" for entry in ENTRIES[peer] for op in entry.ops for pool in POOLS}
    assert set(results) == {case for case in wanted if not case.endswith("decode-dense bf16")}
    compared = {case: errors for case, errors in results.items() if isinstance(errors, dict)}
    silent = {case: why for case, why in results.items() if case not in compared}
    for case, why in silent.items():
        assert "cuda-fused-mtp" in case or why == "not supported: keeps no per-token states", (case, why)
    for errors in compared.values():
        assert errors
        for name, error in errors.items():
            evidence.at_most(f"{peer} {name} rel L2", error, check.PEER_LIMIT)


@pytest.mark.criterion("7.7")
def test_flashinfers_wrappers_take_what_the_adapters_pass(evidence: Evidence) -> None:
    if missing := found.missing("flashinfer"):
        pytest.skip(missing)
    if found.unpacked_folder("flashinfer") is None:
        pytest.skip("flashinfer is installed: its wrappers would compile, which needs a GPU")
    found_keys = run_module("flashinfer_dry_run", "--requests", "1", "8", "64", "--tokens", "1", "4", "12")
    evidence.equal("calls that FlashInfer's wrappers refused", found_keys["failed"], [])
    # three groups of N; each: decode, per T intermediates, outputs, WY and recovery, and the ring for T = 4
    evidence.equal("FlashInfer kernels asked for", len(found_keys["keys"]), 3 * (1 + 3 * 4 + 1))
