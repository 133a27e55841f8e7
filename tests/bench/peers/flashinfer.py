"""FlashInfer's entries as proxies to one worker process."""

from __future__ import annotations

from tests.bench.peers import flashinfer_entries
from tests.bench.peers.remote import Proxy, Worker


def proxies() -> list[Proxy]:
    """One worker for all of them; it starts when the first one is prepared."""
    worker = Worker(flashinfer_entries.__name__)
    return [Proxy(entry, worker) for entry in flashinfer_entries.entries()]
