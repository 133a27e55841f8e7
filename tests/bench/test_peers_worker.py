"""Implementations in a process of their own: its answers, and what is said when it refuses, breaks, dies or hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.implementation import Unsupported
from tests.bench.peers import fake_entries, flashinfer_entries
from tests.bench.peers.remote import Proxy, Remote, Worker
from tests.bench.problem import Shape

SHAPE = Shape("verify-replay", N=2, T=3, H=1, HV=2)
L2_BYTES = 1 << 20  # of a shape this small: 32 ways


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(fake_entries.__name__)
    yield made
    made.stop()


def prepare(worker: Worker, entry: str, shape: Shape = SHAPE) -> tuple[Remote, str]:
    remote = Remote(worker, entry)
    errors, wrong = remote.prepare(shape, seed=0, l2_bytes=L2_BYTES)
    assert set(errors) == {"o"}
    return remote, wrong


@pytest.mark.criterion("7.2")
def test_right_output_is_timed_until_it_is_released(worker: Worker) -> None:
    remote, wrong = prepare(worker, "right")
    assert wrong == ""
    assert remote.round() == 32.0, "one launch of each way"
    remote.release()
    with pytest.raises(RuntimeError, match="right is not prepared"):
        remote.round()


@pytest.mark.criterion("7.1", "7.2")
def test_wrong_output_is_said_and_not_captured(worker: Worker) -> None:
    remote, wrong = prepare(worker, "wrong")
    assert wrong.startswith("wrong: relative L2 error of o is 0.01")
    with pytest.raises(RuntimeError, match="was not captured"):
        remote.round()
    remote.release()


@pytest.mark.criterion("7.2")
def test_entries_of_one_shape_take_turns_and_another_shape_ends_them(worker: Worker) -> None:
    first, _ = prepare(worker, "right")
    second, _ = prepare(worker, "picky", Shape("verify-replay", N=2, T=4, H=1, HV=2))
    assert second.round() == 32.0
    with pytest.raises(RuntimeError, match="right is not prepared"):
        first.round()
    third, _ = prepare(worker, "right", Shape("verify-replay", N=2, T=4, H=1, HV=2))
    assert (second.round(), third.round()) == (32.0, 32.0)
    second.release()
    assert third.round() == 32.0
    third.release()


@pytest.mark.criterion("7.2")
def test_refusals_and_errors_come_back_as_such(worker: Worker) -> None:
    with pytest.raises(Unsupported, match=r"^T is 3, supported: 4, 8$"):
        prepare(worker, "picky")
    with pytest.raises(RuntimeError, match=r"^ValueError: a reason$"):
        prepare(worker, "raises")


@pytest.mark.criterion("7.2")
def test_a_dead_worker_is_reported_and_replaced(worker: Worker) -> None:
    remote, _ = prepare(worker, "right")
    with pytest.raises(RuntimeError, match=r"died with status 3: .*last words"):
        prepare(worker, "dies")
    remote.release()  # what it prepared went with the process
    with pytest.raises(RuntimeError, match="right is not prepared"):
        remote.round()
    assert prepare(worker, "right")[1] == ""
    remote.release()


@pytest.mark.criterion("7.2")
def test_a_silent_worker_is_stopped() -> None:
    impatient = Worker(fake_entries.__name__, prepare_limit=5.0)
    with pytest.raises(RuntimeError, match="did not answer within 5 s and was stopped"):
        prepare(impatient, "hangs")
    assert impatient.process is None


@pytest.mark.criterion("7.2")
def test_a_worker_that_cannot_start_says_why() -> None:
    broken = Worker("tests.bench.peers.a_module_that_is_nowhere")
    with pytest.raises(RuntimeError, match=r"died with status 1: .*No module named"):
        prepare(broken, "right")


def test_proxies_are_not_bound_in_this_process(worker: Worker) -> None:
    proxy = Proxy(flashinfer_entries.Decode(), worker)
    assert (proxy.name.partition("/")[2], proxy.ops) == ("decode", {"decode"})
    assert isinstance(proxy.remote(), Remote)
    with pytest.raises(RuntimeError, match="use remote"):
        proxy.bind(None)  # type: ignore[arg-type]
