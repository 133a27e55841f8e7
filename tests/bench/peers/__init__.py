"""The peers: other projects' kernels for the same operations, run as their users run them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.implementation import Implementation


def peers(seed_checkout: Path | None = None) -> list[Implementation]:
    """Every entry of every peer, here or not: each says itself whether and why it is absent.

    Args:
        seed_checkout: a checkout of FlashQLA (the folder with flash_qla/), None for none.
    """
    from tests.bench.peers import fla, flashinfer, seed, sglang, vllm

    return [
        *(entry() for entry in (*sglang.ENTRIES, *vllm.ENTRIES, *fla.ENTRIES)),
        *flashinfer.proxies(),
        *(entry(seed_checkout) for entry in seed.ENTRIES),
    ]
