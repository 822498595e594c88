"""The shared memory channel under ThreadSanitizer, with threads for ranks: right values, no race; and planted faults.

Every wait of csrc/shm_channel.cpp left out, a flag's store or load weakened to relaxed: each must be reported, or the
gate is worthless. All faults are built into one program, which is told which one to commit.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SOURCES = ("shm_channel.cpp", "shm_wait.cpp", "shm_reduce.cpp")
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-pthread", "-fsanitize=thread", "-Wall", "-Wextra"]
WAIT = r"(await|reached)\(&ShmRank::\w+, [^)]*\)"
WAITS = re.findall(WAIT, (CSRC / "shm_channel.cpp").read_text())
"""Of each place where a flag is waited for, or looked at instead: which of the two."""
PASSED = {"await": "ShmEnd{}", "reached": "true"}
RELAXED = {
    len(WAITS) + 1: ("shm_wait.cpp", r"(__atomic_exchange_n\(&flag->value, value, )__ATOMIC_SEQ_CST\)"),
    len(WAITS) + 2: ("include/shm_wait.h", r"(__atomic_load_n\(&flag->value, )__ATOMIC_SEQ_CST\)"),
}
"""Orders that are weakened: fault -> (file, call up to its order)."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def plant(csrc: Path) -> None:
    """Build the faults into a copy of the sources; fault n acts when the program's `planted` is n."""
    channel = csrc / "shm_channel.cpp"
    numbers = iter(range(1, len(WAITS) + 1))
    text = re.sub(WAIT, lambda m: f"(planted == {next(numbers)} ? {PASSED[m[1]]} : {m[0]})", channel.read_text())
    channel.write_text(f"extern int planted;\n{text}")
    for fault, (name, call) in RELAXED.items():
        text, num = re.subn(
            call, rf"(planted == {fault} ? \1__ATOMIC_RELAXED) : \1__ATOMIC_SEQ_CST))", (csrc / name).read_text()
        )
        assert num == 1, name
        (csrc / name).write_text(text.replace("namespace megalite {", "extern int planted;\nnamespace megalite {", 1))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The program, with all faults built in."""
    folder = tmp_path_factory.mktemp("shm")
    shutil.copytree(CSRC, folder / "csrc")
    plant(folder / "csrc")
    sources = [str(folder / "csrc" / name) for name in SOURCES] + [str(ROOT / "tests" / "shm_host" / "main.cpp")]
    command = [COMPILER, *FLAGS, f"-I{folder / 'csrc' / 'include'}", *sources, "-o", str(folder / "program")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return folder / "program"


def run(program: Path, *words: int | str) -> subprocess.CompletedProcess:
    environment = {"TSAN_OPTIONS": "exitcode=66 halt_on_error=1", "PATH": "/usr/bin:/bin"}
    command = [str(program), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_right_values_and_no_race(program, world):
    done = run(program, 0, world, 40)
    assert done.returncode == 0, done.stderr


def test_a_mismatch_is_told_to_every_rank(program):
    done = run(program, 0, 3, 2, "different")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", range(1, len(WAITS) + 1))
def test_each_wait_left_out_is_reported(program, fault):
    """As a race, or as a wrong value where what was read too late was ordered, or as calls that do not match."""
    done = run(program, fault, 3, 100)
    assert done.returncode in (66, 1, 3), f"{done.returncode}: {done.stderr}"
    assert re.search(r"data race|wrong \w+|ended with state 3", done.stderr)


@pytest.mark.parametrize("fault", RELAXED)
def test_each_weakened_order_is_a_reported_race(program, fault):
    done = run(program, fault, 3, 60)
    assert done.returncode == 66, f"{done.returncode}: {done.stderr}"
    assert "data race" in done.stderr
    assert "shm_channel.cpp" in done.stderr


def test_every_wait_is_among_the_faults():
    text = (CSRC / "shm_channel.cpp").read_text()
    for how, num in (("await", 6), ("reached", 1)):
        assert WAITS.count(how) == num
        assert len(re.findall(rf"\b{how}\(", text)) == num + 1  # and the definition
