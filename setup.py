"""Build of the optional extension `megalite._C` from csrc/, with ninja.

Host parts (*.cpp) are always tried; CUDA parts (*.cu, static cudart, sm_80 and sm_90a) when there is an nvcc.
Nothing here can block an install: what was built, and why not, goes to megalite/_build_info.json and is printed.
There are no lock files: ninja rebuilds whatever a killed build left half done. CXX, NVCC and CUDA_HOME are honoured.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
NAME = "megalite._C"
GENCODE = "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a"
LIMIT_S = 900


@dataclass
class BuildInfo:
    """The content of _build_info.json."""

    built: bool = False
    cuda: bool = False
    compiler: str | None = None
    nvcc: str | None = None
    error: str | None = None


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else the first of the usual names."""
    wanted = os.environ.get("CXX")
    return wanted or next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


def find_nvcc() -> str | None:
    """nvcc: $NVCC, else below $CUDA_HOME, on the PATH, or in the usual place."""
    home = os.environ.get("CUDA_HOME")
    places = [os.environ.get("NVCC"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for place in places if place and (found := shutil.which(place))), None)


def find_ninja() -> str:
    """The ninja executable: the one next to this Python's packages, or the system's."""
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
    else:
        found = str(Path(ninja.BIN_DIR) / "ninja")
    if not found:
        raise RuntimeError("no ninja: pip install ninja, or install without --no-build-isolation")
    return found


def include_flags() -> str:
    """-I flags for Python, pybind11 and csrc/include."""
    try:
        import pybind11
    except ImportError as error:
        raise RuntimeError("no pybind11: pip install pybind11, or install without --no-build-isolation") from error
    folders = [sysconfig.get_path("include"), pybind11.get_include(), str(CSRC / "include")]
    return " ".join(f"-I{shlex.quote(folder)}" for folder in folders)


def ninja_path(path: Path | str) -> str:
    """A path as a build.ninja file spells it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_text(compiler: str, nvcc: str | None) -> str:
    """The build.ninja file: one rule per language, one object per source, one shared library."""
    includes = include_flags()
    define = "-DMEGALITE_CUDA=1" if nvcc else ""
    # no contraction: every operation is rounded once, so all vector levels and the GPU agree to the bit
    host = f"-O3 -std=c++17 -fPIC -pthread -ffp-contract=off -fvisibility=hidden -Wall -Wextra {define} {includes}"
    device = f"-O3 -std=c++17 -Xcompiler -fPIC -ccbin {shlex.quote(compiler)} {GENCODE} {define} {includes}"
    link = f"{nvcc} -shared -cudart static -ccbin {shlex.quote(compiler)}" if nvcc else f"{compiler} -shared -pthread"
    lines = [
        "rule cxx",
        f"  command = {compiler} {host} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule nvcc",
        f"  command = {nvcc} {device} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {link} -o $out $in",
    ]
    objects = []
    for source in sources(cuda=nvcc is not None):
        objects.append(f"{source.name}.o")
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        lines.append(f"build {objects[-1]}: {rule} {ninja_path(source)}")
    lines += [f"build _C{SUFFIX}: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def sources(*, cuda: bool) -> list[Path]:
    """What is compiled, sorted."""
    return sorted([*CSRC.glob("*.cpp"), *(CSRC.glob("*.cu") if cuda else [])])


def run_ninja(compiler: str, nvcc: str | None) -> Path:
    """Compile and link in build/; returns the library. Raises RuntimeError with the compiler's last lines."""
    folder = ROOT / "build" / f"native{SUFFIX.removesuffix('.so')}{'-cuda' if nvcc else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(ninja_text(compiler, nvcc))
    done = subprocess.run(
        [find_ninja(), "-C", str(folder)], capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-20:]))
    return folder / f"_C{SUFFIX}"


def build_native(target: Path) -> BuildInfo:
    """Build into `target`, with CUDA parts where possible, else without; never raises for a failing tool."""
    info = BuildInfo(compiler=find_compiler(), nvcc=find_nvcc())
    has_cuda_sources = any(CSRC.glob("*.cu"))
    target.unlink(missing_ok=True)
    if info.compiler is None:
        info.error = "no C++ compiler (g++, c++ or clang++) was found"
        return info
    for nvcc in [info.nvcc, None] if info.nvcc and has_cuda_sources else [None]:
        try:
            library = run_ninja(info.compiler, nvcc)
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.part")
            shutil.copy(library, part)
            part.replace(target)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            info.error = str(error)
        else:
            info.built, info.cuda = True, nvcc is not None
            break
    return info


class BuildNative(build_ext):
    """build_ext by ninja, with its outcome recorded next to the package's modules."""

    def run(self) -> None:
        """Build; in an editable install also copy the results into the checkout."""
        super().run()
        if self.inplace:
            info = Path(self.build_lib) / "megalite" / "_build_info.json"
            shutil.copy(info, ROOT / "megalite" / info.name)
            if not json.loads(info.read_text())["built"]:  # an extension of older sources would be a trap
                (ROOT / "megalite" / f"_C{SUFFIX}").unlink(missing_ok=True)

    def build_extensions(self) -> None:
        """Replaces the compiler driver of setuptools."""
        target = Path(self.get_ext_fullpath(NAME))
        info = build_native(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / "_build_info.json").write_text(json.dumps(asdict(info), indent=1) + "\n")
        state = ("with CUDA parts" if info.cuda else "host parts only") if info.built else "NOT built (it is optional)"
        print(f"megalite._C: {state}; compiler {info.compiler}, nvcc {info.nvcc}", file=sys.stderr)
        if info.error:
            print(f"megalite._C: {info.error}", file=sys.stderr)


class BuildPackage(build_py):
    """build_py that ships configs/*.yaml as megalite/presets/ and never ships files of an older build."""

    def run(self) -> None:
        """Copy modules and presets; an editable install reads configs/ in place."""
        if self.editable_mode:
            return super().run()
        package = Path(self.build_lib) / "megalite"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        presets = package / "presets"
        presets.mkdir(parents=True, exist_ok=True)
        for preset in sorted((ROOT / "configs").glob("*.yaml")):
            shutil.copy(preset, presets)


setup(
    ext_modules=[Extension(NAME, [str(path.relative_to(ROOT)) for path in sources(cuda=False)], optional=True)],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPackage},
)
