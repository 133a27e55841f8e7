"""Implementations in a process of their own: a worker that answers JSON lines, and proxies that ask it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from tests.bench.implementation import Bound, Unsupported
from tests.bench.peers.entry import Entry
from tests.bench.peers.pins import ROOT
from tests.bench.problem import Problem, Shape

#: seconds that the worker may take: preparing may compile and computes the fp64 reference; a round is one graph replay
PREPARE_LIMIT, ROUND_LIMIT = 600.0, 120.0


class Worker:
    """The process: started when first asked, again after it died. A death or a hang is a RuntimeError of the call."""

    def __init__(self, entries: str, prepare_limit: float = PREPARE_LIMIT, round_limit: float = ROUND_LIMIT) -> None:
        self.command = [sys.executable, "-m", "tests.bench.peers.flashinfer_worker", "--entries", entries]
        self.prepare_limit, self.round_limit = prepare_limit, round_limit
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.log: IO[str] | None = None
        atexit.register(self.stop)

    def start(self) -> subprocess.Popen[str]:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.log, text=True)
        answers: queue.Queue[str | None] = queue.Queue()
        self.answers = answers

        def read(lines: IO[str]) -> None:
            for line in lines:
                answers.put(line)
            answers.put(None)

        threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
        self.process = process
        return process

    def ask(self, limit: float, **request: Any) -> Any:
        """The worker's result. Raises Unsupported, or RuntimeError with what it said, its death or its silence."""
        process = self.process or self.start()
        if process.stdin is None:
            raise RuntimeError("the worker has no standard input")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self.answers.get(timeout=limit)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            self.stop()
            raise RuntimeError(f"its process did not answer within {limit:.0f} s and was stopped") from None
        if line is None:
            said = self.last_words()
            status = process.wait()
            self.stop()
            raise RuntimeError(f"its process died with status {status}: {said}")
        answer = json.loads(line)
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def last_words(self) -> str:
        if self.log is None:
            return ""
        self.log.seek(0)
        return " | ".join(self.log.read().strip().splitlines()[-3:])

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        if self.log is not None:
            self.log.close()
            self.log = None


class Remote:
    """One entry on one shape in the worker, between prepare() and release()."""

    def __init__(self, worker: Worker, entry: str) -> None:
        self.worker, self.entry = worker, entry

    def prepare(self, shape: Shape, seed: int, l2_bytes: int) -> tuple[dict[str, float], str]:
        """(errors, verdict) of one checked launch; captured for `round` if the verdict is "".

        Raises Unsupported, or RuntimeError with the worker's message.
        """
        answer = self.worker.ask(
            self.worker.prepare_limit,
            do="prepare",
            entry=self.entry,
            shape=dataclasses.asdict(shape),
            seed=seed,
            l2_bytes=l2_bytes,
        )
        return answer["errors"], answer["wrong"]

    def round(self) -> float:
        """Microseconds per launch of one graph replay."""
        return float(self.worker.ask(self.worker.round_limit, do="round", entry=self.entry))

    def release(self) -> None:
        """Frees what prepare() made. A worker that is gone has nothing to free."""
        if self.worker.process is None:
            return
        with contextlib.suppress(RuntimeError):
            self.worker.ask(self.worker.round_limit, do="release", entry=self.entry)

    def close(self) -> None:
        """Ends the worker, which all its entries share."""
        self.worker.stop()


class Proxy:
    """An implementation that measuring reaches through `remote()` instead of `bind`."""

    def __init__(self, entry: Entry, worker: Worker) -> None:
        self.name, self.ops, self.note = entry.name, entry.ops, entry.note
        self.entry, self.worker = entry, worker

    def absent(self) -> str:
        return self.entry.absent()

    def remote(self) -> Remote:
        return Remote(self.worker, self.entry.entry)

    def bind(self, problem: Problem) -> Bound:
        raise RuntimeError(f"{self.name} runs in a process of its own: use remote()")

    def __repr__(self) -> str:
        return self.name
