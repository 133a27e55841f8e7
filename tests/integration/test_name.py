"""The wheel beside Hugging Face's `kernels`: real installations with pip, in both orders, and after removing either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.gate_engine import Evidence
from tests.house import CPU_CALL
from tests.integration import frameworks

ROOT = Path(__file__).resolve().parents[2]
OURS = "hopper-gdn"
#: what SGLang 0.5.23 asks for, what transformers 5.24 asks for, and the newest, with what they need; ours goes first?
CASES = (
    (("kernels-0.14.1", "kernels-data-0.16.2"), True),
    (("kernels-0.18.3",), True),
    (("kernels-0.18.3",), False),
    (("kernels-0.19.1",), False),
)
GET_KERNEL = "from kernels import get_kernel; assert callable(get_kernel)"
QWEN = "from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet"
ENTRY = {"transformers": "patch", "sglang": "register", "vllm": "register"}
REPORT = "import runpy, sys; sys.argv = ['integration']; runpy.run_module('integration', run_name='__main__')"
HAS_KERNELS = "from transformers.utils import is_kernels_available; assert is_kernels_available() is {}"

#: imports from the hidden module and from ours, with stand-ins for what the hidden one needs
SIGSTORE = """
import sys
import unittest.mock

import kernels

absent = ["errors", "models", "verify", "verify.policy"]
for name in ["cryptography", "cryptography.x509", "sigstore", *(f"sigstore.{part}" for part in absent)]:
    sys.modules[name] = unittest.mock.MagicMock()
sys.modules["sigstore.verify.policy"].VerificationPolicy = object
from kernels.verify import SignatureVerificationResult, verify_signature
from kernels.verify import recurrent_gated_delta_rule_verify as ours

"""


class Environment:
    """A virtual environment that sees this one's packages behind its own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.elsewhere = folder / "elsewhere"  # no checkout in sight
        self.elsewhere.mkdir()
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip())
        (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"])
        self.site = site

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return subprocess.run(
            [str(self.python), *args], cwd=self.elsewhere, env=clean, capture_output=True, text=True, check=False
        )

    def script(self, text: str) -> str:
        """stdout of a script that has to succeed."""
        done = self.run("-c", text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pip(self, *args: str) -> None:
        done = self.run("-m", "pip", "--disable-pip-version-check", *args)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *wheels: Path) -> None:
        self.pip("install", "--no-index", "--no-deps", "--quiet", *map(str, wheels))

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "--quiet", "--yes", name)

    def files(self) -> dict[Path, bytes]:
        """What is installed as `kernels`, by path."""
        return {path: path.read_bytes() for path in (self.site / "kernels").rglob("*.py")}

    def changed(self, before: dict[Path, bytes]) -> int:
        """How many of these files are gone or have other contents now."""
        return sum(not path.is_file() or path.read_bytes() != content for path, content in before.items())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout."""
    place = tmp_path_factory.mktemp("build")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    tree = shutil.copytree(ROOT, place / "tree", ignore=unwanted)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(tree)]
    done = subprocess.run(build, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = place.glob("*.whl")
    return found


@pytest.fixture
def fresh(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def theirs(names: tuple[str, ...]) -> list[Path]:
    try:
        return [frameworks.wheel(name) for name in names]
    except frameworks.Absent as reason:
        pytest.skip(str(reason))


@pytest.mark.criterion("6.30")
@pytest.mark.parametrize(("names", "ours_first"), CASES, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_both_distributions_in_one_environment(
    fresh: Environment, wheel: Path, names: tuple[str, ...], ours_first: bool, evidence: Evidence
) -> None:
    wheels = theirs(names)
    first, second = ([wheel], wheels) if ours_first else (wheels, [wheel])
    fresh.install(*first)
    before = fresh.files()
    fresh.install(*second)
    # An install would overwrite a shared file silently, and an uninstall of either would take it away.
    evidence.equal("files of the first one that the second one changed", fresh.changed(before), 0)
    fresh.script(f"{CPU_CALL}\n{GET_KERNEL}\n{QWEN}")
    if ours_first:
        fresh.uninstall("kernels")
        fresh.script(f"{CPU_CALL}\n{QWEN}\n{HAS_KERNELS.format(False)}")
        assert fresh.run("-c", GET_KERNEL).returncode != 0
        evidence.equal("files of ours that went with theirs", fresh.changed(before), 0)
    else:
        fresh.uninstall(OURS)
        fresh.script(f"{GET_KERNEL}\n{QWEN}")
        assert fresh.run("-c", "import kernels.verify.api").returncode != 0
        evidence.equal("files of theirs that went with ours", fresh.changed(before), 0)


@pytest.mark.criterion("6.30")
def test_transformers_takes_the_version_it_asks_for(fresh: Environment, wheel: Path) -> None:
    fresh.install(wheel, *theirs(("kernels-0.18.3",)))
    fresh.script(f"{HAS_KERNELS.format(True)}\n{QWEN}\n{CPU_CALL}")


@pytest.mark.criterion("6.30")
def test_names_of_a_module_that_our_package_hides_are_found(fresh: Environment, wheel: Path) -> None:
    """kernels 0.18.3 has kernels/verify.py, behind kernels/verify/. It imports sigstore, an option of theirs."""
    fresh.install(wheel, *theirs(("kernels-0.18.3",)))
    done = fresh.run("-c", "from kernels.verify import verify_signature")
    assert "No module named 'cryptography'" in done.stderr or "No module named 'sigstore'" in done.stderr
    printed = fresh.script(SIGSTORE + "print(verify_signature.__code__.co_filename, ours.__code__.co_filename)").split()
    places = [Path(place).relative_to(fresh.site).as_posix() for place in printed]
    assert places == ["kernels/verify.py", "kernels/verify/api.py"]
    assert "cannot import name 'nothing'" in fresh.run("-c", "from kernels.verify import nothing").stderr


@pytest.mark.criterion("6.31")
def test_a_shadowed_editable_install_says_what_to_do(fresh: Environment, wheel: Path) -> None:
    fresh.install(*theirs(("kernels-0.19.1",)))
    (fresh.site / "_hopper_gdn_editable.pth").write_text(str(ROOT))  # what an editable install comes to
    done = fresh.run("-m", "integration")
    assert done.returncode == 1
    assert str(fresh.site / "kernels") in done.stderr and "pip install ." in done.stderr
    for adapter, entry in ENTRY.items():
        on = "import os; os.environ['HOPPER_GDN_VLLM'] = '1'"  # vLLM's stays silent where nobody asked for it
        done = fresh.run("-c", f"{on}; import integration.{adapter} as adapter; adapter.{entry}()")
        assert "Shadowed" in done.stderr and "pip install ." in done.stderr, done.stderr


@pytest.mark.criterion("6.31")
def test_a_wheel_has_no_problem(fresh: Environment, wheel: Path) -> None:
    fresh.install(wheel, *theirs(("kernels-0.19.1",)))
    report = fresh.script(REPORT)
    assert "kernels.verify can be imported" in report and "kernels 0.19.1" in report
    assert "entry point integration." in report


@pytest.mark.criterion("6.31")
def test_an_editable_install_alone_works(fresh: Environment) -> None:
    (fresh.site / "_hopper_gdn_editable.pth").write_text(str(ROOT))
    assert "kernels.verify can be imported" in fresh.script(REPORT)
    fresh.script(CPU_CALL)
