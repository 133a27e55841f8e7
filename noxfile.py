"""Sessions: one shared environment, one session per gate, the suite, lint and the site.

    nox -s gate0 gate1 verify          the main job; add `-- --record` to write specs/results/
    nox -s tests                       the suite; of the costliest tests a sample, which another commit draws anew
    nox -s bench                       gate 7, and speed beside the peers (Hopper GPU)
    nox -s frameworks                  fetches what gate 6 runs against (network; gate 6 and the suite do it first)
    nox -s peers                       fetches what bench measures beside the kernels (network, no GPU)
    nox -s precompile                  compiles for a GPU machine, into disk caches (no GPU)
    nox -s lint | docs                 style and types | the rendered design and results
    nox -t gates                       all gates in order
    nox --no-venv -s ...               use the running interpreter's packages as they are

On a machine with an NVIDIA driver and a torch of its own, the environment builds on that torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
OWN_TORCH = shutil.which("nvidia-smi") is not None and importlib.util.find_spec("torch") is not None

PACKAGES = (
    *("tilelang", "apache-tvm-ffi", "numpy", "packaging"),
    *("pytest", "pytest-xdist", "pytest-benchmark", "hypothesis", "mpmath", "pyyaml", "tqdm"),
    *("transformers", "safetensors", "einops"),
    *("mkdocs", "mkdocs-material"),
    *("ruff", "mypy", "types-PyYAML"),
    *("build", "hatchling"),
    *("nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump"),
)
#: without their own requirements: only single files of theirs are used
BARE_PACKAGES = ("fla-core",)
#: the CUDA compiler, where no nvcc is on the PATH
NVCC_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")

NO_TESTS_RAN = 5  # pytest's exit code where every file says that it needs a GPU

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["gate0", "gate1", "verify"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True


#: makes the packages in a directory visible to an environment, behind its own; works from within a venv too
SEE_PACKAGES = "import pathlib, sys, sysconfig; " + (
    "pathlib.Path(sysconfig.get_paths()['purelib'], 'own_torch.pth').write_text(sys.argv[1])"
)
#: the interpreter that sessions run; `env` replaces it under --no-venv
interpreter = str(ROOT / ".nox" / "env" / "bin" / "python")


@nox.session(default=False)
def env(session: nox.Session) -> None:
    """The environment all others share: what the constraints file pins, installed once per content of that file."""
    global interpreter
    if session.virtualenv.venv_backend == "none":
        interpreter = sys.executable
        return
    packages = PACKAGES if shutil.which("nvcc") else PACKAGES + NVCC_PACKAGES
    recipe = CONSTRAINTS.read_text() + repr((packages, BARE_PACKAGES, OWN_TORCH, sys.version))
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / "hopper-gdn.stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return
    pins = Path(session.create_tmp()) / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if not (OWN_TORCH and line.startswith("torch=="))))
    if OWN_TORCH:
        session.run("python", "-c", SEE_PACKAGES, sysconfig.get_paths()["purelib"])
    else:
        session.install("torch", "--constraint", str(pins))
    session.install(*packages, "--constraint", str(pins))
    session.install("--no-deps", *BARE_PACKAGES, "--constraint", str(pins))
    stamp.write_text(digest)


def in_env(*tags: str, requires: str = "env"):  # type: ignore[no-untyped-def]
    """A session that runs in the shared environment, behind the session that it requires."""
    return nox.session(venv_backend="none", requires=[requires], tags=list(tags))


def run_python(session: nox.Session, *args: str, success_codes: Sequence[int] = (0,)) -> None:
    session.run(interpreter, *args, external=True, success_codes=success_codes)


def run_pytest(session: nox.Session, *args: str) -> None:
    # A worker holds fp64 results of gigabytes on a GPU, and a compiler on a CPU.
    workers = str(min(os.cpu_count() or 1, 4 if OWN_TORCH else 8))
    run_python(
        session, "-m", "pytest", "-n", workers, "--dist", "worksteal", "--benchmark-disable", *args, *session.posargs
    )


@in_env("gates")
def gate0(session: nox.Session) -> None:
    """The primitives: instructions, registers, spills, values; the emulator's own proof."""
    run_pytest(session, "--gate", "0")


@in_env("gates")
def gate1(session: nox.Session) -> None:
    """The references: recurrence = chunk form = independent implementations; mutants are caught."""
    run_pytest(session, "--gate", "1")


@in_env("gates")
def decode(session: nox.Session) -> None:
    """Gate 2: the decode programs against the reference, on the emulator or the GPU."""
    run_pytest(session, "--gate", "2")


@in_env("gates")
def verify(session: nox.Session) -> None:
    """Gate 3: the verify programs against the reference, on the emulator or the GPU."""
    run_pytest(session, "--gate", "3")


@in_env("gates")
def prepass(session: nox.Session) -> None:
    """Gate 4: gates and norms ahead of verify, with the same bits; the rule that says when."""
    run_pytest(session, "--gate", "4")


@in_env("gates")
def replay(session: nox.Session) -> None:
    """Gate 5: verify that stores no states, commit and ring, against the reference, on the emulator or the GPU."""
    run_pytest(session, "--gate", "5")


@in_env("gates", requires="frameworks")
def integration(session: nox.Session) -> None:
    """Gate 6: SGLang, transformers and vLLM as released call the kernels through the adapters."""
    run_pytest(session, "--gate", "6")


@in_env("gates")
def bench(session: nox.Session) -> None:
    """Gate 7, then kernels, peers and ceilings side by side (Hopper GPU; options: tests/bench/options.py)."""
    run_pytest(session, "--gate", "7")
    files = [f"tests/bench/bench_{name}.py" for name in ("speed", "starts")]
    run_python(
        session, "-m", "pytest", "--speed", "--benchmark-columns=median,iqr,min,rounds", "--benchmark-sort=mean",
        "-q", "-rs", *files, *session.posargs, success_codes=[0, NO_TESTS_RAN],
    )  # fmt: skip


@in_env("gates")
def robustness(session: nox.Session) -> None:
    """Gate 8: arbitrary inputs, races and memory, limits, start-up, torch's operators, packaging."""
    run_pytest(session, "--gate", "8")


@in_env()
def frameworks(session: nox.Session) -> None:
    """SGLang's and vLLM's released Python files, and older transformers, into .frameworks/."""
    run_python(session, "-m", "tests.integration.frameworks", *session.posargs)


@in_env()
def peers(session: nox.Session) -> None:
    """The peers of the bench into .peers/, packed as well for a machine without network; `-- sglang` for only one."""
    run_python(session, "-m", "tests.bench.peers.fetch", *session.posargs)


@in_env()
def precompile(session: nox.Session) -> None:
    """What the records name into disk caches, to be copied to a GPU machine; `-- 2 5 bench` for some."""
    run_python(session, "-m", "tests.precompile", *session.posargs)


@in_env(requires="frameworks")
def tests(session: nox.Session) -> None:
    """The suite of all gates; of tests that generate a program a case a sample, which another commit draws anew."""
    run_pytest(session, "--sample")


@in_env()
def lint(session: nox.Session) -> None:
    """Formatting, style and types."""
    run_python(session, "-m", "ruff", "format", "--check", ".")
    run_python(session, "-m", "ruff", "check", ".")
    run_python(session, "-m", "mypy")


@in_env()
def docs(session: nox.Session) -> None:
    """The rendered design and results in .site/, with the outcomes of the last local gate run beside the records."""
    run_python(session, "-m", "tests.sources")
    run_python(session, "-m", "mkdocs", "build", "--strict", *session.posargs)
    session.log(f"open {ROOT / '.site' / 'index.html'}")
