"""Every deliberately wrong reference is told apart by the inputs and limits of this suite's own tests."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Iterator

import pytest
import torch

from reference import mutants, pool
from reference.chunk import chunked
from tests.gate_engine import Evidence
from tests.reference.cases import CASES, FP32_LIMIT, FP64_LIMIT, Case, rel_l2
from tests.reference.independent import FLA, TRANSFORMERS, NotInstalled
from tests.reference.scenario import SCENARIOS, Scenario, batch_and_expectation, deviation


def runs(name: str, of: Case | Scenario) -> bool:
    """A transposed state is an error of shape unless K == V."""
    return name != "transposed_state" or of.K == of.V


def first_seen(errors: Iterable[float], required: float) -> float:
    """The first error that is large enough, else the largest. Memory touched and NaN count as 1."""
    largest = 0.0
    for error in errors:
        largest = max(largest, error if math.isfinite(error) else 1.0)
        if largest >= required:
            break
    return largest


@pytest.mark.criterion("1.13")
@pytest.mark.parametrize("name", mutants.names("step", "sequence"))
def test_chunk_form_sees(name: str, evidence: Evidence) -> None:
    """As in criterion 1.1: fp64, o and every state."""

    def errors() -> Iterator[float]:
        for case in (case for case in CASES if runs(name, case)):
            o, states = mutants.recurrent(name)(**case.inputs())
            o_chunk, states_chunk = chunked(**case.inputs(), chunk_size=16)
            yield max(rel_l2(o_chunk, o), rel_l2(states_chunk, states))

    required = 1e6 * FP64_LIMIT
    evidence.at_least("mutant recurrence: rel L2 to the chunk form", first_seen(errors(), required), required)


@pytest.mark.criterion("1.13")
@pytest.mark.parametrize("name", mutants.names("step", "sequence"))
def test_independent_implementation_sees(name: str, evidence: Evidence) -> None:
    """As in criteria 1.4 and 1.5: fp32, o and the last state. Only FLA's function takes a scale."""

    def errors() -> Iterator[float]:
        for case in (case for case in CASES if runs(name, case)):
            other = (TRANSFORMERS if case.scale is None else FLA)["recurrent"]
            o, states = mutants.recurrent(name)(**case.inputs(torch.float32, stored_in=torch.float64))
            o_other, last = other(**case.inputs(torch.float32))
            yield max(rel_l2(o_other, o), rel_l2(last, states[-1]))

    required = 10 * FP32_LIMIT
    try:
        seen = first_seen(errors(), required)
    except NotInstalled as error:
        pytest.skip(f"{error}: not run here")
    evidence.at_least("mutant recurrence: rel L2 to other implementations", seen, required)


@pytest.mark.criterion("1.13")
@pytest.mark.parametrize("name", mutants.names("step", "sequence", "gating", "pool"))
def test_pool_scenarios_see(name: str, evidence: Evidence) -> None:
    """As in criterion 1.8."""

    def errors() -> Iterator[float]:
        for scenario in (scenario for scenario in SCENARIOS if runs(name, scenario)):
            batch, expected = batch_and_expectation(scenario)
            yield deviation(batch.run(mutants.verify_gated_fwd(name)), expected)

    required = 1e6 * FP64_LIMIT
    evidence.at_least("mutant call: rel L2 to the expected buffers", first_seen(errors(), required), required)


@pytest.mark.criterion("1.13")
@pytest.mark.parametrize("name", mutants.names("commit"))
def test_commit_sees(name: str) -> None:
    snapshots = torch.arange(4 * 3 * 2 * 2 * 2, dtype=torch.float32).reshape(4, 3, 2, 2, 2)
    results = []
    for commit in (pool.commit, mutants.commit(name)):
        destination = torch.zeros(5, 2, 2, 2)
        slots, rows, steps = torch.tensor([2, 4, 0]), torch.tensor([3, 2, 1]), torch.tensor([2, -1, 1])
        commit(destination, slots, snapshots, rows, steps)
        results.append(destination)
    assert not torch.equal(*results)


@pytest.mark.criterion("1.13")
def test_every_mutant_is_described() -> None:
    for mutant in mutants.MUTANTS.values():
        assert mutant.description.endswith("."), mutant.name
        assert mutant.level in typing.get_args(mutants.Level)
    assert len(mutants.names()) == len(mutants.MUTANTS) > len(mutants.names(subtle=False)) > 0


@pytest.mark.criterion("1.13")
def test_a_mutant_of_another_level_is_refused() -> None:
    with pytest.raises(ValueError, match="of level 'pool'"):
        mutants.recurrent("commit_unasked")


@pytest.mark.criterion("1.13")
@pytest.mark.parametrize("name", ["read_before_update", "scale_on_key", "decay_grows"])
def test_decode_mutants(name: str) -> None:
    batch, results = batch_and_expectation(SCENARIOS[0])[0], []
    slots = torch.tensor([3], dtype=torch.int32)
    for decode in (pool.decode, mutants.decode(name)):
        states = batch.pool(batch.before.clone().pool_storage)
        o = torch.empty(1, batch.HV, batch.scenario.V, dtype=torch.float64)
        decode(*batch.raw(slice(1)), batch.A_log, batch.dt_bias, states, slots, o, dtype=torch.float64)
        results.append(o)
    assert rel_l2(results[1], results[0]) > 1e6 * FP64_LIMIT


@pytest.mark.criterion("1.13")
@pytest.mark.parametrize("name", ["no_decay", "beta_ignored", "output_bands_swapped"])
def test_preactivated_mutants(name: str) -> None:
    batch, results = batch_and_expectation(SCENARIOS[0])[0], []
    q, k, v, g, beta = batch.raw(slice(7))
    ends, slots = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    states = batch.pool(batch.before.pool_storage)
    for verify in (pool.verify_fwd, mutants.verify_fwd(name)):
        o = torch.empty(7, batch.HV, batch.scenario.V, dtype=torch.float64)
        verify(q, k, v, -g.abs(), beta.sigmoid(), states, slots, ends, o, dtype=torch.float64)
        results.append(o)
    assert rel_l2(results[1], results[0]) > 1e6 * FP64_LIMIT
