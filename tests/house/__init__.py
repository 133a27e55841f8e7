"""Tests of what the other tests stand on: the gate engine, labels and sources, the wheel."""

#: a verify of three tokens on CPU tensors, for interpreters that are to run it in some environment
CPU_CALL = """
import torch
from kernels import verify

torch.manual_seed(0)
H, HV, K, V, T = 1, 2, 8, 4, 3
states = torch.randn(2, HV, V, K)
steps = torch.zeros(1, T, HV, V, K)
o = verify.recurrent_gated_delta_rule_verify(
    torch.rand(HV), torch.randn(T, HV), torch.randn(HV), torch.randn(T, H, K), torch.randn(T, H, K),
    torch.randn(T, HV, V), torch.randn(T, HV), states, torch.tensor([1]).int(), torch.tensor([0, T]).int(),
    steps, torch.tensor([0]).int(),
)
assert o.shape == (T, HV, V) and o.isfinite().all() and o.any() and steps.any()
"""
