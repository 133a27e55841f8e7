"""Record what real Qwen3-Next and Qwen3.5 layers hand to the recurrence, and what it returns.

    python -m tests.data.capture_real_inputs           # write tests/data/*.safetensors
    python -m tests.data.capture_real_inputs --check   # regenerate and compare bit for bit, write nothing

Each case builds transformers' own model in bf16, one linear and one full attention layer (its cache wants one),
with transformers' random initialisation, and feeds it bytes of the repository's LICENSE as token ids: first a
prefill, then a block of T tokens. It keeps the tensors of the block at the layer's own borders: the raw gates where
the projections return them, everything else where the module-global recurrence is called. Nothing of the layer is
computed here.

Two things are set from outside. Between prefill and block the layer's recurrent state is rounded to bf16, as a
bf16 pool would keep it, so that the stored state is exactly the one the layer continued from. And for the cases
marked "mamba", dt_bias gets the training initialisation of the Gated DeltaNet paper's code (dt log-uniform in
[0.001, 0.1], dt_bias its inverse softplus) in place of transformers' ones, under which nearly every head forgets
within a token or two.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent
LICENSE = FOLDER.parent.parent / "LICENSE"
PREFILL = 192


@dataclasses.dataclass(frozen=True)
class Case:
    model: Literal["qwen3_next", "qwen3_5"]
    H: int
    HV: int
    T: int
    dt: Literal["ones", "mamba"]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model}_h{self.H}_hv{self.HV}_t{self.T}_{self.dt}"


CASES = (
    Case("qwen3_next", H=2, HV=4, T=12, dt="mamba", seed=1),
    Case("qwen3_next", H=4, HV=16, T=16, dt="mamba", seed=2),
    Case("qwen3_5", H=2, HV=2, T=16, dt="ones", seed=3),
    Case("qwen3_5", H=1, HV=3, T=12, dt="mamba", seed=4),
)


def config_of(case: Case) -> dict[str, Any]:
    """The model's configuration, apart from transformers' defaults."""
    return {
        "vocab_size": 256,
        "hidden_size": 1024,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": case.H,
        "linear_num_value_heads": case.HV,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        **({"mlp_only_layers": [0, 1]} if case.model == "qwen3_next" else {}),
    }


def build_model(case: Case) -> Any:
    torch.manual_seed(case.seed)
    if case.model == "qwen3_next":
        model: Any = transformers.Qwen3NextModel(transformers.Qwen3NextConfig(**config_of(case)))
    else:
        model = transformers.Qwen3_5TextModel(transformers.Qwen3_5TextConfig(**config_of(case)))
    layer = model.layers[0].linear_attn
    if case.dt == "mamba":
        dt = torch.exp(torch.empty(case.HV).uniform_(math.log(1e-3), math.log(1e-1)))
        layer.dt_bias.data.copy_(dt + torch.log(-torch.expm1(-dt)))
    return model.to(torch.bfloat16).eval()


@contextlib.contextmanager
def recorder(layer: Any, record: dict[str, Tensor]) -> Iterator[None]:
    """While active, `record` holds the tensors of the layer's latest call of the recurrence."""
    module: Any = importlib.import_module(type(layer).__module__)
    original = module.torch_chunk_gated_delta_rule
    recurrence = inspect.unwrap(original)  # the torch function, whatever faster ones are installed

    def wrapped(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        record["state"] = kwargs["initial_state"].clone()  # the cache overwrites it in place
        o, state = recurrence(query, key, value, **kwargs)
        record.update(q=query, k=key, v=value, g=kwargs["g"], beta=kwargs["beta"], o=o, state_after=state)
        return o, state

    module.torch_chunk_gated_delta_rule = wrapped
    undo = record_raw_gates(layer, record)
    try:
        yield
    finally:
        module.torch_chunk_gated_delta_rule = original
        undo()


def record_raw_gates(layer: Any, record: dict[str, Tensor]) -> Callable[[], None]:
    """Keep a and b as the layer splits or projects them. Returns what removes the recording."""
    if hasattr(layer, "fix_query_key_value_ordering"):
        split = layer.fix_query_key_value_ordering

        def wrapped(*args: Any) -> Any:
            parts = split(*args)
            record["b"], record["a"] = parts[-2:]
            return parts

        layer.fix_query_key_value_ordering = wrapped
        return lambda: delattr(layer, "fix_query_key_value_ordering")

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _args, out: record.update({name: out})

    handles = [getattr(layer, f"in_proj_{x}").register_forward_hook(keep(x)) for x in "ab"]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


@torch.no_grad()
def capture(case: Case) -> dict[str, Tensor]:
    """One case's tensors: [T, heads, dim] without the batch, states V-major [HV, V, K]."""
    torch.set_num_threads(1)  # the order of the sums inside a product depends on it
    model = build_model(case)
    layer = model.layers[0].linear_attn
    text = torch.frombuffer(bytearray(LICENSE.read_bytes()), dtype=torch.uint8).long()[None]
    start = 40 * case.seed
    prefill, block = text[:, start : start + PREFILL], text[:, start + PREFILL : start + PREFILL + case.T]

    cache = transformers.DynamicCache(config=model.config)
    record: dict[str, Tensor] = {}
    model(input_ids=prefill, cache=cache, use_cache=True)
    state = cache.get_recurrent_state(0, state_idx=0)
    cache.update_recurrent_state(state.bfloat16().to(state.dtype), 0)
    with recorder(layer, record):
        model(input_ids=block, cache=cache, use_cache=True)

    tensors = {name: record[name][0].clone() for name in ("q", "k", "v", "a", "b", "g", "beta", "o")}
    tensors["state"] = record["state"][0].mT.bfloat16()
    if not torch.equal(tensors["state"].to(record["state"].dtype), record["state"][0].mT):
        raise RuntimeError("the layer did not continue from the rounded state")
    tensors["state_after"] = record["state_after"][0].mT.float()
    tensors["A_log"], tensors["dt_bias"] = layer.A_log.data.float(), layer.dt_bias.data
    return {name: x.contiguous() for name, x in tensors.items()}


def metadata(case: Case) -> dict[str, str]:
    """One JSON string: safetensors does not keep the order of several entries."""
    facts = {
        "regenerate": "python -m tests.data.capture_real_inputs",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "case": dataclasses.asdict(case),
        "config": config_of(case),
        "text_sha256": hashlib.sha256(LICENSE.read_bytes()).hexdigest(),
        "prefill": PREFILL,
    }
    return {"facts": json.dumps(facts, sort_keys=True)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Record real inputs of the recurrence.")
    parser.add_argument("--check", action="store_true", help="compare with the recorded files, write nothing")
    check = parser.parse_args(argv).check
    different = 0
    for case in CASES:
        path, tensors = FOLDER / f"{case.name}.safetensors", capture(case)
        if not check:
            save_file(tensors, path, metadata(case))
            print(f"{path.name}: {path.stat().st_size} bytes")
            continue
        recorded = load_file(path)
        wrong = [name for name, x in tensors.items() if not torch.equal(x, recorded[name])]
        print(f"{path.name}: {'identical' if not wrong else 'different: ' + ', '.join(wrong)}")
        different += bool(wrong)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
