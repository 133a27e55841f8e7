"""The shapes of the project: one table for tests, benchmarks and docs.

K = V = 128 in every model of the Qwen3-Next / Qwen3.5 class; H and HV are per tensor-parallel rank.
"""

from __future__ import annotations

import torch

#: (H, HV) as served: whole models and their shards, down to the smallest
HEADS = ((16, 32), (16, 48), (16, 64), (4, 8), (2, 4))

#: dtypes of the state pool in service
POOLS = (torch.bfloat16, torch.float32)

#: requests in a batch, from one user to a full server
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

#: tokens of a request in one call: plain decode, and blocks of draft tokens up to DFlash's 16
TOKENS = (1, 2, 4, 8, 12, 16)
