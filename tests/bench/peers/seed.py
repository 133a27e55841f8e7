"""The kernels this project started from (FlashQLA's GDN decode and verify), run from a checkout that the user names."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

from reference.gating import l2norm
from tests.bench.implementation import Bound, refuse_unless
from tests.bench.peers.entry import DENSE, Calls, per_request
from tests.bench.problem import SCALE, Problem

PACKAGE = "flash_qla.ops.gated_delta_rule.fused_recurrent"


def short_commit(checkout: Path) -> str:
    """Of HEAD; of an unpacked archive the commit in its name ("FlashQLA-<commit>"), else "checkout"."""
    if not (checkout / ".git").exists():
        named = re.search(r"-([0-9a-f]{7,40})$", checkout.name)
        return named[1][:7] if named else "checkout"
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "checkout"


@functools.cache
def load(checkout: Path) -> types.ModuleType:
    """Its package queries the device when it is imported, and raises where that is not SM90."""
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(str(checkout))


class Seed:
    """Base of the entries; `checkout` is the folder that has flash_qla/, None if none was named."""

    entry: str
    ops = frozenset({"verify-snapshots"})
    note = DENSE

    def __init__(self, checkout: Path | None) -> None:
        self.checkout = checkout.resolve() if checkout else None
        commit = short_commit(self.checkout) if self.checkout else "checkout"
        self.name = f"flashqla-{commit}/{self.entry}"

    def absent(self) -> str:
        if self.checkout is None:
            return "not here: no checkout of it was named (--seed-checkout)"
        if not (self.checkout / "flash_qla").is_dir():
            return "not here: the folder named by --seed-checkout has no flash_qla/"
        try:
            load(self.checkout)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            return f"not here: flash_qla does not import: {type(error).__name__}: {reason}"
        return ""

    def package(self) -> types.ModuleType:
        if self.checkout is None:
            raise RuntimeError("no checkout was named: ask absent() first")
        return load(self.checkout)

    def bind(self, problem: Problem) -> Bound:
        """Raises Unsupported for a shape outside the peer."""
        raise NotImplementedError


class Verify(Seed):
    """Gates and norms inside the one kernel."""

    entry = "gated"

    def bind(self, problem: Problem) -> Bound:
        verify = self.package().fused_recurrent_gdr_verify_gated_fwd
        q, k, v = (x[None] for x in problem.dense)
        a, b, o, snapshots = problem.a[None], problem.b[None], problem.o[None], problem.snapshots

        def launch(way: int) -> None:
            verify(
                q, k, v, a, b, problem.A_log, problem.dt_bias, problem.pool, problem.indices[way],
                problem.cu_seqlens, snapshots[way], problem.rows, o, scale=SCALE, disable_state_update=True,
            )  # fmt: skip

        return Bound(launch, lambda: {"o": per_request(problem, o), "states": snapshots[0]}, problem.reset)


class Auto(Seed):
    """Its public entry, which puts gates and norms into a launch of their own where it expects that to pay."""

    entry = "auto"

    def bind(self, problem: Problem) -> Bound:
        verify = self.package().recurrent_gated_delta_rule_verify
        q, k, v = (x[None] for x in problem.dense)
        a, b, o, snapshots = problem.a[None], problem.b[None], problem.o[None], problem.snapshots

        def launch(way: int) -> None:
            verify(
                problem.A_log, a, problem.dt_bias, q, k, v, b, problem.pool, problem.indices[way], problem.cu_seqlens,
                snapshots[way], problem.rows, cache_steps=problem.shape.T, o=o, scale=SCALE, fuse_gating=True,
            )  # fmt: skip

        return Bound(launch, lambda: {"o": per_request(problem, o), "states": snapshots[0]}, problem.reset)


class Decode(Seed):
    entry = "decode"
    ops = frozenset({"decode-dense"})
    note = f"allocates what it returns; q and k are normalised before, not timed; {DENSE}"

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, pool="fp32")
        decode = self.package().recurrent_gated_delta_rule
        (g, beta), states = problem.activated, problem.initial_k_major
        q, k, v = (x.unflatten(0, (problem.shape.N, problem.shape.T)) for x in problem.dense)
        q, k = (l2norm(x).to(v.dtype) for x in (q, k))  # it would do that in launches of torch's
        calls = Calls(lambda way: decode(q, k, v, g, beta, scale=SCALE, initial_state=states[way]))
        return Bound(
            calls,
            lambda: {"o": calls.returned[0][0], "final": calls.returned[0][1].mT},
            problem.reset,
        )


ENTRIES: tuple[type[Seed], ...] = (Verify, Auto, Decode)
