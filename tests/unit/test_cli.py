"""The command line: exit codes, messages on stderr, what is imported, and what is passed down."""

import json
import os
import re
import signal
import subprocess
import sys
import types

import pytest

from megalite import cli

HEAVY = ("torch", "numpy", "matplotlib", "tokenizers")


@pytest.fixture
def command(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def stand_in(monkeypatch, name: str, **functions) -> None:
    """Put a module with these functions in the place of a part of megalite."""
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("arguments", [["--help"], ["config", "show", "gpt_tiny_cpu"], ["config", "schema"]])
def test_light_commands_import_nothing_heavy(arguments):
    code = (
        "import sys; from megalite.cli import main; code = main(sys.argv[1:]); "
        f"print([m for m in {HEAVY!r} if m in sys.modules], code)"
    )
    made = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert made.stdout.splitlines()[-1] == "[] 0", made.stderr


def test_python_m_megalite():
    made = subprocess.run(
        [sys.executable, "-m", "megalite", "train", "gpt_tiny_cpu", "mesh.tp=3", "lr.peak=-1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 2
    assert made.stdout == ""
    assert made.stderr.startswith("error: gpt_tiny_cpu: 4 problems\n  lr.peak=-1 must be a number >= 0; ")
    assert "mesh.tp=3 does not divide model.num_heads=4; use 1, 2 or 4" in made.stderr
    assert "Traceback" not in made.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["train"], "Missing argument"),
        (["train", "gpt_tiny_cpu", "--mesh.tp=1"], "No such option"),
        (["launch", "gpt_tiny_cpu", "--nnodes", "x"], "--nnodes"),
        (["launch", "gpt_tiny_cpu", "--nnodes", "0"], "--nnodes"),
        (["train", "no_such_preset"], "no_such_preset: no such file"),
        (["train", "gpt_tiny_cpu", "mesh.tp"], "override 'mesh.tp' is not key=value"),
        (["config", "show", "."], ".: is a folder"),
        (["data", "prepare", "x"], "Missing option"),
        (["schedule", "--png", "no_folder/x.png"], "--png no_folder/x.png can't be written: No such file or directory"),
        (["schedule", "--svg", "."], "--svg . can't be written: Is a directory; give the name of a file"),
        (["schedule", "--trace", f"{__file__}/x"], "x can't be written: Not a directory"),
        (["kernels", "bench", "gelu", "--tiny", "--json", "no_folder/x"], "--json no_folder/x can't be written"),
        (["data", "prepare", __file__, "--tokenizer", "byte", "--output", f"{__file__}/x"], "is not a folder that can"),
    ],
)
def test_mistakes_of_the_user(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("arguments", [[], ["config"], ["data"], ["checkpoint"]])
def test_no_command_shows_the_help(command, arguments):
    code, out, err = command(*arguments)
    assert code == 2
    assert "Usage" in out + err
    assert "error" not in err


def test_config_show(command):
    code, out, err = command("config", "show", "gpt_tiny_cpu", "mesh.tp=1")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "mesh.tp = 1  # override" in lines
    assert "batch.num_microbatches = 4  # follows from global_batch_size / (micro_batch_size * dp)" in lines
    assert any(re.fullmatch(r"mesh.pp = 2  # .*gpt_tiny_cpu.yaml:\d+", line) for line in lines)


def test_config_show_yaml_loads_again(command, tmp_path):
    _, first, _ = command("config", "show", "llama3_8b", "--yaml", "run.steps=7")
    (tmp_path / "again.yaml").write_text(first)
    assert command("config", "show", str(tmp_path / "again.yaml"), "--yaml")[1] == first


def test_config_schema(command):
    code, out, _ = command("config", "schema")
    schema = json.loads(out)
    assert code == 0
    assert schema["additionalProperties"] is False
    assert "tp" in schema["$defs"]["MeshSection"]["properties"]


def test_train_gets_the_config_and_the_environment(command, monkeypatch):
    got = {}

    def run(config, env):
        got.update(tp=config.mesh.tp, env=dict(env))
        return 3

    stand_in(monkeypatch, "megalite.train.main", run=run)
    monkeypatch.setenv("MEGALITE_TEST", "here")
    assert command("train", "gpt_tiny_cpu", "mesh.tp=1")[0] == 3
    assert got["tp"] == 1
    assert got["env"]["MEGALITE_TEST"] == "here"


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ValueError("x.bin: too short"), 2, "error: x.bin: too short\n"),
        (RuntimeError("a fault"), 1, "RuntimeError: a fault"),
        (KeyboardInterrupt(), 1, "interrupted\n"),
    ],
)
def test_how_train_ends(command, monkeypatch, error, code, shown):
    def run(config, env):
        raise error

    stand_in(monkeypatch, "megalite.train.main", run=run)
    found, out, err = command("train", "gpt_tiny_cpu")
    assert (found, out) == (code, "")
    assert shown in err
    assert ("Traceback" in err) == (code == 1 and shown != "interrupted\n")


def test_exit_codes_of_system_exit_pass(monkeypatch):
    def run(config, env):
        raise SystemExit(3)

    stand_in(monkeypatch, "megalite.train.main", run=run)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "gpt_tiny_cpu"])
    assert caught.value.code == 3


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no such corpus"), 2), (RuntimeError("a fault"), 1), (SystemExit(0), None)]
)
def test_a_rank_leaves_its_error_for_the_launcher(command, monkeypatch, tmp_path, error, code):
    def run(config, env):
        raise error

    stand_in(monkeypatch, "megalite.train.main", run=run)
    monkeypatch.setenv("MEGALITE_ERROR_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    try:
        assert command("train", "gpt_tiny_cpu") == (code, "", "")  # the launcher prints it, not the rank
    except SystemExit:
        assert code is None
    files = list(tmp_path.iterdir())
    if code is None:
        assert files == []
    else:
        entry = json.loads(files[0].read_text())
        assert (entry["rank"], entry["exit_code"], str(error) in entry["text"]) == (5, code, True)


def test_a_rank_reports_a_bad_config_too(command, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGALITE_ERROR_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    assert command("train", "gpt_tiny_cpu", "mesh.tp=3")[0] == 2
    assert json.loads((tmp_path / "rank0.json").read_text())["exit_code"] == 2


ENTRY = """
import atexit, os, sys, types
stand_in = types.ModuleType("megalite.train.main")
def run(config, env):
    atexit.register(os.abort)
    print("some steps")
    raise ValueError("no such corpus")
stand_in.run = run
sys.modules["megalite.train.main"] = stand_in
from megalite.cli import entry
sys.exit(entry())
"""


@pytest.mark.parametrize(("variables", "code"), [({"RANK": "0"}, 2), ({}, -signal.SIGABRT)])
def test_a_rank_that_failed_ends_without_a_teardown(tmp_path, variables, code):
    """Without a launcher there is one: the second case shows that this one would be seen."""
    env = {**os.environ, **({"MEGALITE_ERROR_DIR": str(tmp_path)} if variables else {}), **variables}
    line = [sys.executable, "-c", ENTRY, "train", "gpt_tiny_cpu"]
    made = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stdout) == (code, "some steps\n")
    assert made.stderr == ("" if variables else "error: no such corpus\n")


def test_launch_passes_what_train_needs(command, monkeypatch):
    got = {}

    def launch(config, arguments, **options):
        got.update(options, world=config.world_size, arguments=arguments)
        return 1

    stand_in(monkeypatch, "megalite.launch.main", launch=launch)
    line = [
        "launch",
        "gpt_tiny_cpu",
        "mesh.tp=1",
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv=h:1",
        "--slurm",
        "run.steps=30",
    ]
    assert command(*line)[0] == 1
    assert got.pop("env") == dict(os.environ)
    assert got == {
        "world": 4,
        "arguments": ["gpt_tiny_cpu", "mesh.tp=1", "run.steps=30"],
        "nnodes": 2,
        "node_rank": 1,
        "rdzv": "h:1",
        "slurm": True,
    }


def test_launch_refuses_a_bad_config_before_it_starts_anything(command, monkeypatch):
    def launch(config, arguments, **options):
        raise AssertionError("must not start")

    stand_in(monkeypatch, "megalite.launch.main", launch=launch)
    for override, word in {
        "mesh.tp=3": "mesh.tp=3",
        "pipeline={schedule: none.csv}": "none.csv can't be read",
        "model.frozen=[none]": "model.frozen=none matches no tensor",
    }.items():
        code, _, err = command("launch", "gpt_tiny_cpu", override)
        assert code == 2
        assert word in err


def test_schedule(command):
    code, out, _ = command("schedule", "--kind", "interleaved", "--pp", "2", "--virtual", "2", "--microbatches", "4")
    assert code == 0
    assert "0F0" in out
    code, _, err = command("schedule", "--kind", "interleaved", "--pp", "2", "--virtual", "2", "--microbatches", "3")
    assert code == 2
    assert err.startswith("error: ")


def test_schedule_files_have_names_of_their_own_or_default_ones(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zbv = ("schedule", "--kind", "zbv", "--pp", "4", "--microbatches", "8")
    for given, names in {
        ("--png",): ["png: schedule_zbv_pp4_m8.png"],
        ("--png", "--svg", "mine.svg", "--trace"): [
            "png: schedule_zbv_pp4_m8.png", "svg: mine.svg", "trace: schedule_zbv_pp4_m8.json"
        ],
        ("--trace", "t.json", "--png=p.png", "--svg"): ["png: p.png", "svg: schedule_zbv_pp4_m8.svg", "trace: t.json"],
    }.items():  # fmt: skip
        code, out, err = command(*zbv, *given)
        assert code == 0, err
        assert out.splitlines()[-len(names) :] == names
        assert {path.name for path in tmp_path.iterdir()} == {name.split()[1] for name in names}
        for path in tmp_path.iterdir():
            path.unlink()
    code, out, err = command("schedule", "--png", "--kind", "interleaved", "--pp", "2", "--virtual", "3")
    assert (code, out.splitlines()[-1]) == (0, "png: schedule_interleaved_pp2_v3_m8.png"), err


def test_data_prepare_and_inspect(command, tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be")
    prefix = str(tmp_path / "corpus")
    code, out, err = command("data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "byte", "--output", prefix)
    assert code == 0, err
    assert out.strip()
    code, out, _ = command("data", "inspect", prefix)
    assert code == 0
    assert "to be or not to be" in out
    code, _, err = command("data", "inspect", str(tmp_path / "nothing"))
    assert code == 2
    assert "nothing" in err


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_checkpoint_commands(command, monkeypatch, tmp_path, name):
    code, _, err = command("checkpoint", name, str(tmp_path / "nothing"))
    assert code == 2
    assert "nothing" in err
    stand_in(monkeypatch, "megalite.checkpoint.command", **{name: lambda directory: f"{name} of {directory}"})
    assert command("checkpoint", name, "d") == (0, f"{name} of d\n", "")


def test_a_reader_that_leaves_early():
    made = subprocess.run(
        f"{sys.executable} -m megalite config schema | head -c 5",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.stdout == '{\n  "'
    assert made.stderr == ""
