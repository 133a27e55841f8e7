"""The example script in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate_engine import Evidence

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
STATE = 3 * 4 * 128 * 128 * 4  # bytes: three layers, four heads, K x V, fp32


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "integration.examples.speculative_generate", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.criterion("6.14")
@pytest.mark.parametrize("right", (0.9, 1.0))
def test_summary_adds_up(right: float, evidence: Evidence) -> None:
    done = run("--tokens", "50", "--block", "12", "--right", str(right))
    assert done.returncode == 0, done.stderr
    numbers = re.search(
        r"tokens: (\d+) in (\d+) blocks of (\d+)\nspeed: .*\ndrafts: (\d+) of (\d+) accepted.*\n"
        r"states stored: (\d+) bytes by verify, (\d+) bytes by commit\nthe tokens are those",
        done.stdout,
    )
    assert numbers is not None, done.stdout
    tokens, blocks, block, accepted, drafted, stored, committed = map(int, numbers.groups())
    evidence.equal("tokens", (tokens, block), (50, 12))
    evidence.equal("drafts", drafted, blocks * 11)
    # The first token is the prompt's; of the last block as many are left out as there are too many.
    surplus = 1 + blocks + accepted - tokens
    evidence.equal("the sum is short of no token, and over by less than a block", 0 <= surplus < block, True)
    evidence.equal("bytes stored by verify", stored, blocks * block * STATE)
    evidence.equal("bytes stored by commit", committed, blocks * STATE)
    if right == 1.0:
        evidence.equal("drafts accepted when all are right", accepted, drafted)
    evidence.equal("the bar ends at all tokens", "50/50" in done.stderr, True)


@pytest.mark.criterion("6.14")
@pytest.mark.parametrize(
    ("options", "says"),
    (
        (("--tokens", "0"), "--tokens is 0"),
        (("--block", "17"), "--block is 17"),
        (("--right", "2"), "--right is 2"),
        (("--device", "tpu"), "--device is tpu"),
    ),
)
def test_bad_arguments(options: tuple[str, str], says: str) -> None:
    done = run(*options)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
