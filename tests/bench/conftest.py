"""The benchmark run as fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests import machine as machine_facts
from tests.bench.options import implementations
from tests.bench.record import Record
from tests.bench.session import Session

FILE = "bench.sm90.json"
RUN = pytest.StashKey[Session]()


@pytest.fixture(scope="session")
def speed(pytestconfig: pytest.Config) -> Iterator[Session]:
    """The one run of this pytest session."""
    root, option = pytestconfig.rootpath, pytestconfig.getoption
    recorded = root / "specs" / "results" / FILE
    commit = option("--commit") or machine_facts.commit(root)
    try:
        baseline = Record.read(recorded) if option("--compare") else None
        session = Session.start(
            root / ".gates" / FILE,
            implementations(pytestconfig),
            commit,
            resume=option("--resume"),
            baseline=baseline,
        )
    except ValueError as error:
        pytest.exit(str(error), returncode=2)
    yield session
    pytestconfig.stash[RUN] = session
    if option("--record"):
        shutil.copyfile(session.path, recorded)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session = config.stash.get(RUN, None)
    if session is None:
        return
    out = terminalreporter
    out.write_sep("=", f"speed on {session.record.device}")
    for name, ceiling in session.record.ceilings.items():
        out.write_line(f"  ceiling {name:<14}{ceiling.value:>8.1f} {ceiling.unit:<5} {ceiling.how}")
    shape = None
    for row in session.record.rows:
        if row.shape != shape:
            shape = row.shape
            out.write_line(f"  {shape}")
        timed = "" if row.us is None else f"{row.us:>9.2f} us {row.gbps:>8.0f} GB/s"
        share = "" if row.share is None else f"{row.share:>6.0%}"
        out.write_line(f"    {row.impl:<44}{timed:<24}{share:<7} {row.note}")
    for (slow, impl), (now, before) in session.slower.items():
        out.write_line(
            f"  SLOWER than the record, twice: {impl}, {slow}: {now:.2f} us against {before:.2f} us", red=True
        )
