"""Compile every GPU kernel for sm_80 and sm_90, with no GPU, and look at the machine code.

Triton kernels come from the COMPILE lists of megalite/kernels/*/triton_impl.py, CUDA kernels from csrc/*.cu (where nvcc
is found). A kernel fails when it spills, has a stack, needs more shared memory or registers than a block may have,
lacks the instructions it was designed for, or got worse than the baseline next to this file.
`--update` writes the baseline. Results are cached by source under .cache/, so that a second run is quick.
"""

import argparse
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("compile_gate_baseline.json")
CACHE = ROOT / ".cache" / "compile_gate"
NVCC_ARCHS = {"sm_80": "sm_80", "sm_90": "sm_90a"}
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "-Xptxas",
    "-warn-spills",
    "-Werror",
    "all-warnings",
    "-I",
    str(ROOT / "csrc/include"),
]
WAITS = (r"LDG\.E\.STRONG\.SYS", r"CCTL\.IVALL")
"""An acquire of the whole system, which throws away what the L1 cache holds."""
SIGNALS = (r"MEMBAR\.ALL\.SYS", r"STG\.E\.STRONG\.SYS")
"""A release to the whole system."""
MOVES = (r"LDG\.E\.128", r"STG\.E\.128", r"\A(?![\s\S]*LDG\S*CONSTANT)")
"""16 bytes at once, and nothing through the read-only cache, which does not know of peers' stores."""
CUDA_EXPECT: dict[str, tuple[str, ...] | dict[str, tuple[str, ...]]] = {
    "adamw": (r"LDG\.E\.128", r"STG\.E\.128"),
    "grad_norm": (r"LDG\.E\.128", r"SHFL"),
    "symm_all_reduce": WAITS + SIGNALS + MOVES,
    "symm_barrier": WAITS + SIGNALS,
    "symm_gather": WAITS + SIGNALS + MOVES,
    "symm_multimem": {
        "sm_90": WAITS
        + SIGNALS
        + MOVES
        + (r"LDGMC\.E\.ADD\.F32x4", r"LDGMC\.E\.F32ADD\.BF16x8", r"LDGMC\.E\.F32ADD\.F16x8")
    },
    "symm_scatter": WAITS + SIGNALS + MOVES,
}
"""Source's stem -> instructions that one of its kernels must hold: for all architectures, or by architecture."""
REGISTERS_PER_BLOCK = 65_536
REGISTER_SLACK, SHARED_SLACK = 8, 1_024
"""How much worse than the baseline is still the same."""

sys.path.insert(0, str(ROOT))
os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported, which happens later
os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton")

from megalite.kernels.compile_cases import ARCHS, SHARED_LIMITS, CompileCase  # noqa: E402


@dataclass(frozen=True)
class Job:
    """One compilation. `source` is a module of Triton kernels, or a .cu file; `key` names its result in the cache."""

    name: str
    arch: str
    source: str
    key: str
    threads: int = 0
    expect: tuple[str, ...] = ()

    @property
    def triton(self) -> bool:
        """Whether it is compiled by Triton."""
        return not self.source.endswith(".cu")


@dataclass
class Result:
    """What the machine code of one job is made of."""

    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    missing: list[str] = field(default_factory=list)
    error: str = ""


def triton_jobs(modules: Iterable[str]) -> list[Job]:
    """Both architectures of every case of these modules."""
    triton = importlib.import_module("triton")
    jobs = []
    for name in modules:
        for listed in importlib.import_module(name).COMPILE:
            for arch in ARCHS:
                case = listed.on(arch)
                expect = tuple(case.expect.get(arch, ()))
                settings = [case.signature, case.constexprs, case.num_warps, case.num_stages, case.attrs, expect, arch]
                key = digest(triton.__version__, jit(case).cache_key, repr(settings))
                jobs.append(Job(case.name, arch, name, key, 32 * case.num_warps, expect))
    return jobs


def cuda_jobs(files: Iterable[Path], nvcc: str) -> list[Job]:
    """Both architectures of every source; the key covers the headers."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    headers = [path.read_text() for path in sorted((ROOT / "csrc" / "include").glob("*"))]
    jobs = []
    for file in files:
        for arch in ARCHS:
            expect = CUDA_EXPECT.get(file.stem, ())
            expect = expect.get(arch, ()) if isinstance(expect, dict) else expect
            key = digest(version, *headers, file.read_text(), repr(NVCC_FLAGS), repr(expect), arch)
            jobs.append(Job(f"csrc/{file.name}", arch, str(file), key, expect=expect))
    return jobs


def digest(*texts: str) -> str:
    """A name for these texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def jit(case: CompileCase) -> Any:
    """The function below decorators such as autotune."""
    kernel = case.kernel
    while not hasattr(kernel, "cache_key"):
        kernel = kernel.fn
    return kernel


def compile_triton(case: CompileCase, arch: str) -> tuple[bytes, int]:
    """The cubin, and the bytes of shared memory that a launch asks for."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    kernel = jit(case)
    unknown = (set(case.signature) | set(case.constexprs) | set(case.attrs)) - set(kernel.arg_names)
    if unknown:
        raise ValueError(f"{case.name}: {', '.join(sorted(unknown))} are not arguments of {kernel.__name__}")
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in case.attrs}
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    made = triton.compile(source, target=target, options=options)
    return made.asm["cubin"], made.metadata.shared


def compile_cuda(file: Path, arch: str, nvcc: str) -> bytes:
    """The cubin of one source."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.cubin"
        command = [nvcc, "-cubin", f"-arch={NVCC_ARCHS[arch]}", *NVCC_FLAGS, "-o", str(out), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr).strip())
        return out.read_bytes()


def dump(cubin: bytes, what: str) -> str:
    """cuobjdump's text; the program lies in Triton's wheel."""
    tool = importlib.import_module("triton").knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, f"--dump-{what}", file.name], capture_output=True, text=True, check=True).stdout


def inspect(cubin: bytes, *, expect: Iterable[str], shared: int = 0) -> Result:
    """Count over all kernels of a cubin (the largest of each), and look for the expected instructions."""
    usage, sass = dump(cubin, "resource-usage"), dump(cubin, "sass")

    def most(word: str) -> int:
        return max((int(number) for number in re.findall(rf"\b{word}:(\d+)", usage)), default=0)

    return Result(
        registers=most("REG"),
        stack=most("STACK"),
        spills=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        shared=max(shared, most("SHARED")),
        missing=[pattern for pattern in expect if not re.search(pattern, sass)],
    )


def run(job: Job) -> Result:
    """Compile and inspect one job, or take its cached result; an error is part of the result."""
    cached = CACHE / f"{job.key}.json"
    if cached.exists():
        return Result(**json.loads(cached.read_text()))
    try:
        if job.triton:
            case = next(c for c in importlib.import_module(job.source).COMPILE if c.name == job.name)
            cubin, shared = compile_triton(case.on(job.arch), job.arch)
            result = inspect(cubin, expect=job.expect, shared=shared)
        else:
            result = inspect(compile_cuda(Path(job.source), job.arch, find_nvcc()), expect=job.expect)
    except Exception as error:  # anything a compiler raises is this kernel's failure, not the gate's
        return Result(error=f"{type(error).__name__}: {error}")
    CACHE.mkdir(parents=True, exist_ok=True)
    part = cached.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(result)))
    part.replace(cached)
    return result


def find_nvcc() -> str | None:
    """nvcc on the PATH or in the usual place."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def faults(job: Job, result: Result) -> list[str]:
    """What is wrong with the machine code, whatever it was before."""
    if result.error:
        return [f"does not compile: {result.error}"]
    found = [f"lacks {pattern} in its SASS" for pattern in result.missing]
    if result.spills or result.stack:
        found.append(f"{result.spills} spill instructions, {result.stack} bytes of stack")
    if result.shared > SHARED_LIMITS[job.arch]:
        found.append(f"{result.shared} bytes of shared memory, limit {SHARED_LIMITS[job.arch]}")
    if result.registers * job.threads > REGISTERS_PER_BLOCK:
        found.append(f"{result.registers} registers x {job.threads} threads, limit {REGISTERS_PER_BLOCK}")
    return found


def regressions(job: Job, result: Result, baseline: dict[str, Any], tools: dict[str, str]) -> list[str]:
    """What got worse; numbers of another compiler are not compared, a kernel without a baseline is."""
    old = baseline["kernels"].get(job.name, {}).get(job.arch)
    if old is None:
        return ["is not in the baseline; look at it, then run with --update"]
    tool = "triton" if job.triton else "nvcc"
    if baseline["tools"].get(tool) != tools[tool] or result.error:
        return []
    slack = {"registers": REGISTER_SLACK, "shared": SHARED_SLACK}
    return [
        f"{what} {old[what]} -> {getattr(result, what)}"
        for what, more in slack.items()
        if getattr(result, what) > old[what] + more
    ]


def tool_versions(nvcc: str | None) -> dict[str, str]:
    """The compilers that the numbers depend on."""
    versions = {"triton": importlib.import_module("triton").__version__}
    if nvcc:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        versions["nvcc"] = re.search(r"\bV([\d.]+)", text)[1]
    return versions


def table(jobs: list[Job], results: list[Result], problems: dict[Job, list[str]]) -> str:
    """One line per kernel and architecture."""
    width = max(len(job.name) for job in jobs)
    lines = [f"{'kernel':{width}}  arch   registers  shared  stack  spills"]
    for job, result in zip(jobs, results, strict=True):
        numbers = f"{result.registers:9}  {result.shared:6}  {result.stack:5}  {result.spills:6}"
        notes = "".join(f"\n    FAIL {text}" for text in problems[job])
        lines.append(f"{job.name:{width}}  {job.arch}  {numbers}{notes}")
    return "\n".join(lines)


def all_jobs(nvcc: str | None) -> list[Job]:
    """Everything that is compiled."""
    impls = sorted((ROOT / "megalite" / "kernels").glob("*/triton_impl.py"))
    jobs = triton_jobs(f"megalite.kernels.{path.parent.name}.triton_impl" for path in impls)
    return jobs + (cuda_jobs(sorted((ROOT / "csrc").glob("*.cu")), nvcc) if nvcc else [])


def gone(jobs: list[Job], baseline: dict[str, Any], *, cuda: bool) -> list[str]:
    """Kernels of the baseline that are no longer compiled, so that none is lost by accident."""
    names = {job.name for job in jobs}
    return [n for n in baseline["kernels"] if n not in names and (cuda or not n.startswith("csrc/"))]


def write_baseline(jobs: list[Job], results: list[Result], tools: dict[str, str]) -> None:
    """The present numbers."""
    kernels: dict[str, Any] = {}
    for job, result in zip(jobs, results, strict=True):
        kernels.setdefault(job.name, {})[job.arch] = {"registers": result.registers, "shared": result.shared}
    BASELINE.write_text(json.dumps({"tools": tools, "kernels": kernels}, indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Compile, print the table; 1 when a kernel fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the baseline instead of comparing with it")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose name matches")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    nvcc = find_nvcc()
    jobs = [job for job in all_jobs(nvcc) if re.search(options.only, job.name)]
    if not jobs:
        print(f"no kernel matches {options.only!r}", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(run, jobs))
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"tools": {}, "kernels": {}}
    tools = tool_versions(nvcc)
    problems = {job: faults(job, result) for job, result in zip(jobs, results, strict=True)}
    if not options.update:
        for job, result in zip(jobs, results, strict=True):
            problems[job] += regressions(job, result, baseline, tools)
    lost = [] if options.update or options.only else gone(jobs, baseline, cuda=nvcc is not None)
    print(table(jobs, results, problems))
    for name in lost:
        print(f"FAIL {name} is in the baseline but no longer compiled; run with --update if it was removed on purpose")
    if not nvcc:
        print("no nvcc: csrc/*.cu were not compiled")
    failed = sum(bool(texts) for texts in problems.values()) + len(lost)
    if options.update and not failed and not options.only:
        write_baseline(jobs, results, tools)
    spills, versions = sum(result.spills for result in results), ", ".join(f"{k} {v}" for k, v in tools.items())
    print(f"{len(jobs)} compilations, {failed} failed, {spills} spills ({versions})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
