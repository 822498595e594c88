"""What tools/compile_gate.py compiles of a Triton kernel, on a machine with no GPU: one tuned configuration.

Each `triton_impl.py` lists its kernels in `COMPILE`. This module needs no triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ARCHS = ("sm_80", "sm_90")
SHARED_LIMITS = {"sm_80": 166_912, "sm_90": 232_448}
"""Bytes of shared memory that one block may have (A100, H100)."""


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the values that a launch would give it.

    kernel:     the `triton.jit` function.
    name:       unique, e.g. "rmsnorm_forward/4096-bf16".
    signature:  argument -> Triton type, e.g. {"x": "*bf16", "stride": "i64"}; constexprs may be left out.
    constexprs: argument -> value.
    attrs:      arguments whose value (pointers: address) is divisible by 16, as torch's allocations are.
    expect:     architecture -> patterns that its SASS must contain, e.g. {"sm_80": (r"LDG\\.E\\.128",)}.
    tuned:      architecture -> what a launch there gives instead: constexprs, num_warps, num_stages.
    """

    kernel: Any
    name: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int = 2
    attrs: tuple[str, ...] = ()
    expect: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, arch: str) -> "CompileCase":
        """The case as it is launched on one architecture."""
        return replace(self, **self.tuned.get(arch, {}), tuned={})
