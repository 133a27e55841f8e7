"""Speed: every implementation on every shape. Run by `nox -s bench`; not part of the suite, since no test is timed.

One test is one row. The first test of a shape measures all implementations of it, interleaved; pytest-benchmark shows
the samples side by side, a group per shape.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import machine as machine_facts
from tests.bench.check import is_ours
from tests.bench.options import implementations
from tests.bench.ours import is_for
from tests.bench.problem import Shape
from tests.bench.session import DeviceClock, Session
from tests.bench.shapes import chosen

if machine_facts.kind() != "sm90":
    pytest.skip("needs a Hopper GPU: no speed is measured here", allow_module_level=True)

CLOCK = DeviceClock()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    try:
        shapes = chosen(option("--full"), filter(None, option("--ops").split(",")), option("--heads"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    offered = implementations(metafunc.config)
    cases = [(shape, i.name) for shape in shapes for i in offered if shape.op in i.ops and is_for(i, shape)]
    metafunc.parametrize(("shape", "impl"), cases, ids=[f"{shape} {impl}" for shape, impl in cases])


@pytest.mark.benchmark(timer=CLOCK)
def test_speed(shape: Shape, impl: str, speed: Session, benchmark: Any) -> None:
    row = speed.row(shape, impl)
    if is_ours(impl):
        assert row.checked, f"{impl} on {shape}: {row.note}"
    samples = speed.samples.get(row.key)
    if samples is None:
        pytest.skip(row.note if row.us is None else f"measured before: {row.us:.2f} us")
    benchmark.group = str(shape)
    benchmark.extra_info.update(row.as_json())
    benchmark.pedantic(CLOCK.play(samples), rounds=len(samples), iterations=1)
    if is_ours(impl) and row.key in speed.slower:
        now, before = speed.slower[row.key]
        pytest.fail(f"slower than the record, twice: {now:.2f} us against {before:.2f} us")
