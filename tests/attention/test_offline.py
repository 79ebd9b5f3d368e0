"""The Triton kernels compile for GPUs, without one: the interpreter runs code that the compiler refuses.

As a script, with TRITON_INTERPRET=0, this file compiles them and prints the shared memory of each.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnlab.attention.ops.kernels import factor, factor_kernel, latent, latent_kernel, merge, own, rotary, split

ARCHITECTURES = {80: 166912, 89: 101376, 90: 232448}  # compute capability: bytes of shared memory of a block
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Absent(split.Device):
    """A device that is not there."""

    def __init__(self, capability: int) -> None:
        self.processors, self.shared_memory = 100, ARCHITECTURES[capability]


def shared_memory(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int
) -> int:
    """Bytes of shared memory of a compiled kernel; integers are int32, pointers and strides multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name.startswith(("key_", "value_"))]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    result: int = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared
    return result


def attend(capability: int, dtype: torch.dtype, lines: int, content: int, rest: int, shared: bool, masked: bool) -> int:
    """Of the latent kernel, in the sizes that it chooses for this device, less those that the choice expected."""
    latent.device_of = lambda _: Absent(capability)  # type: ignore[assignment]
    widths = latent.Widths(content, rest, content, shared)
    padded = widths.padded
    blocks = latent.choose_blocks(lines, padded, shared, dtype, torch.device("cpu"))
    pointer = f"*{NAMES[dtype]}"
    types = dict.fromkeys(("q", "key", "value"), pointer) | dict.fromkeys(("partial", "sums"), "*fp32")
    types |= {"counts": "*i64", "mask": "*u8", "scale": "fp32"}
    constants = {
        "COUNTED": not masked, "MASKED": masked, "SHARED": shared,
        "CONTENT": content, "REST": rest, "VALUE": content,
        "CONTENT_BLOCK": padded[0], "REST_BLOCK": padded[1], "VALUE_BLOCK": padded[2],
        "LINES": blocks.lines, "SLOTS": blocks.slots, "PRECISION": "ieee", "WIDE": False, "BITS": 0,
        "KEY_GROUP": 1, "KEY_BYTES": 1, "VALUE_GROUP": 1, "VALUE_BYTES": 1,
    }  # fmt: skip
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return shared_memory(latent_kernel.attend, types, constants, capability, **options)


def factors(capability: int, dtype: torch.dtype, heads: int, ranks: int, query_ranks: int, width: int) -> int:
    """Of the factor kernel, in the sizes that it chooses for this device."""
    factor.device_of = lambda _: Absent(capability)  # type: ignore[assignment]
    with torch.device("meta"):
        head = torch.empty(1, ranks, heads, 64, dtype=dtype)
        token = torch.empty(1, ranks, 64, width, dtype=dtype)
    blocks = factor.choose_blocks(heads, factor.FactorPart(head, token, head, token), width)
    names = ("query_head", "query", "key_head", "key_token", "value_head", "value_token")
    types = dict.fromkeys(names, f"*{NAMES[dtype]}") | dict.fromkeys(("partial", "sums"), "*fp32")
    types |= {"counts": "*i64", "scale": "fp32"}
    constants = {
        "HEADS": heads, "RANKS": ranks, "QUERY_RANKS": query_ranks, "WIDTH": width, "THIRD": 0, "COUNTED": True,
        "FIXED": False, "WIDE": False, "LINES": blocks.lines,
        "POSITIONS": blocks.slots, "WIDTH_BLOCK": factor.padded(width),
        "QUERY_BLOCK": factor.padded(query_ranks), "STAGES": blocks.stages, "PRECISION": "ieee",
    }  # fmt: skip
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return shared_memory(factor_kernel.attend, types, constants, capability, **options)


def main() -> None:
    """Print a line for each kernel: its name, what it takes, and what there is."""
    for capability, memory in ARCHITECTURES.items():
        for case in (
            (torch.bfloat16, 32, 512, 64, True, False),
            (torch.float16, 100, 128, 0, False, True),
            (torch.float32, 4, 64, 32, True, False),
        ):
            print(json.dumps([f"latent {capability} {case}", attend(capability, *case), memory]))
        for inputs in ((torch.bfloat16, 34, 2, 6, 64), (torch.float16, 22, 2, 0, 128), (torch.float32, 5, 1, 4, 32)):
            print(json.dumps([f"factor {capability} {inputs}", factors(capability, *inputs), memory]))
    types = {"partial": "*fp32", "sums": "*fp32", "out": "*bf16"}
    print(
        json.dumps(
            ["reduce", shared_memory(split.reduce_kernel, types, {"SPLITS": 64, "PART": 32, "BLOCK": 64}, 90), 2**16]
        )
    )
    types = dict.fromkeys(("slots", "latent", "rotary", "hidden", "gates"), "*bf16")
    types |= {"places": "*i64", "firsts": "*i64", "counts": "*i32"}
    constants = {"PLACED": True, "NUMBERED": True, "STRIDE": 2, "LATENT": 500, "ROTARY": 64, "GATES": 128}
    constants |= {"LATENT_BLOCK": 512, "ROTARY_BLOCK": 64, "GATES_BLOCK": 128}
    print(json.dumps(["merge", shared_memory(merge.merge_kernel, types, constants, 90), 2**16]))
    types = dict.fromkeys(("lse", "earlier_lse", "cos", "sin"), "*fp32") | {"scale": "fp32"}
    numbers = ("q", "packed", "earlier", "out", "grad", "from_q", "from_k", "from_v", "dq", "dpacked", "x")
    types |= dict.fromkeys(numbers, "*bf16")
    constants = {"WIDTH": 96, "VALUE": 64, "WIDTH_BLOCK": 128, "VALUE_BLOCK": 64, "ROWS": own.ROWS}
    for kernel in (own.merge_own_kernel, own.merge_own_backward_kernel):
        print(json.dumps([f"{kernel.fn.__name__}", shared_memory(kernel, types, constants, 90), 2**16]))
    constants = {"REST": 64, "PAIRS": 16, "REST_BLOCK": 64, "PAIRS_BLOCK": 16, "ROWS": rotary.ROWS}
    print(json.dumps(["rotary", shared_memory(rotary.rotary_kernel, types, constants, 90), 2**16]))


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_fit_their_shared_memory() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr
    result = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(result) == 23
    for name, taken, there in result:
        assert taken <= there, name


if __name__ == "__main__":
    main()
