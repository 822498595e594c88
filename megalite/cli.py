"""The commands. Exit codes: 0 done, 2 the user's input is wrong, 3 stopped by a signal after saving, 1 anything else.

This is the only place that reads the environment, which it passes down as a mapping. Modules are imported inside the
commands, so that help, `config` and mistakes in a config answer at once, without torch.
"""

import json
import os
import shutil
import sys
import traceback
from typing import Annotated

import typer
from typer import Argument, Option
from typer.core import TyperCommand

EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 1, 2, 3
CLICK_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt; older ones raise Abort."""
UsageError = typer.BadParameter.__base__
"""Wrong options: click's class, or that of the copy of click inside newer typer."""

app = typer.Typer(name="megalite", help="Pretrain GPT models.", no_args_is_help=True, add_completion=False)
config_app = typer.Typer(help="Show a config, or what one may hold.", no_args_is_help=True)
data_app = typer.Typer(help="Make and look at corpora.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)
kernels_app = typer.Typer(help="Which kernels run here, whether they are right, how fast.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(kernels_app, name="kernels")


class OptionalFileNames(TyperCommand):
    """A command whose --png, --svg and --trace may stand without a file name: it then is the empty text.

    click's own options with an optional value are not in every typer, so the arguments are completed before parsing.
    """

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        """Parse, with `--png` made `--png=` where no value follows."""
        following = [*args[1:], "-"]
        bare = [
            arg in ("--png", "--svg", "--trace") and after.startswith("-")
            for arg, after in zip(args, following, strict=True)
        ]
        return super().parse_args(ctx, [f"{arg}=" if alone else arg for arg, alone in zip(args, bare, strict=True)])


ConfigPath = Annotated[str, Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped preset.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Ops = Annotated[list[str] | None, Argument(metavar="[OP ...]", help="Default: all.")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[key=value ...]", help="Overrides, e.g. mesh.tp=4 data.train=[{path: x}].")
]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> int:
    """Train: one process of a job (alone, or started by launch, torchrun or srun)."""
    env = dict(os.environ)
    from megalite.launch.child import end_with_launcher, report_error, report_stop, started_by_launch

    end_with_launcher(env)
    try:
        from megalite.config.load import load_config

        loaded = load_config(config, overrides or [])
        from megalite.train.main import run

        code = run(loaded, env)
    except BaseException as error:
        code = _exit_code(error)
        report_error(env, error, exit_code=code)
        if started_by_launch(env) and code:
            return code  # the launcher prints it, once for all ranks
        raise
    if code == EXIT_STOPPED:
        report_stop(env)
    return code


@app.command()
def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    nnodes: Annotated[int, Option(help="Nodes of the job; run this command on each.", min=1)] = 1,
    node_rank: Annotated[int, Option(help="This node, counted from 0.", min=0)] = 0,
    rdzv: Annotated[str | None, Option(metavar="HOST:PORT", help="Where the nodes meet: node 0.")] = None,
    slurm: Annotated[bool, Option("--slurm", help="Print an sbatch script instead of starting ranks.")] = False,
) -> int:
    """Start the ranks of a job on this node and wait for them."""
    from megalite.config.load import load_config

    overrides = overrides or []
    loaded = load_config(config, overrides)
    from megalite.launch.main import launch as start

    if not slurm:
        from megalite.train.build import check_plan

        check_plan(loaded)  # rather than on every rank

    return start(
        loaded, [config, *overrides], env=dict(os.environ), nnodes=nnodes, node_rank=node_rank, rdzv=rdzv, slurm=slurm
    )


@app.command()
def verify(config: ConfigPath, overrides: Overrides = None) -> int:
    """Check on this machine's CPU that a config's layout trains as one device does."""
    from megalite.config.load import load_config

    loaded = load_config(config, overrides or [])
    from megalite.verify.main import verify as check

    return check(loaded)


@app.command(cls=OptionalFileNames)
def schedule(
    kind: Annotated[
        str, Option(help="gpipe, 1f1b, interleaved, zb_h1, zb_h2, zbv, v_half, dualpipe_v, or a .csv file.")
    ] = "1f1b",
    pp: Annotated[int, Option(help="Pipeline parallel size.", min=1)] = 4,
    virtual: Annotated[int | None, Option(help="Chunks per rank; default what the kind needs.", min=1)] = None,
    microbatches: Annotated[int, Option(help="Microbatches per step.", min=1)] = 8,
    costs: Annotated[
        str,
        Option(
            metavar="F,I,W,SEND",
            help="Lengths of forward, input and weight gradient, and message; zb_h2 is made for them.",
        ),
    ] = "1,1,1,0",
    png: Annotated[
        str | None, Option(metavar="[FILE]", help="Also draw it; default schedule_<kind>_pp<pp>_m<microbatches>.png.")
    ] = None,
    svg: Annotated[
        str | None, Option(metavar="[FILE]", help="Also draw it; default schedule_<kind>_pp<pp>_m<microbatches>.svg.")
    ] = None,
    trace: Annotated[str | None, Option(metavar="[FILE]", help="Also write a Chrome/Perfetto trace.")] = None,
) -> None:
    """Draw a pipeline schedule, with its bubble and its memory."""
    from megalite.parallel.pp.command import Outputs, schedule_command

    outputs = Outputs(png, svg, trace)
    print(
        schedule_command(
            kind, pp=pp, virtual=virtual, num_microbatches=microbatches, costs=costs, outputs=outputs
        ).rstrip("\n")
    )


@data_app.command("prepare")
def data_prepare(
    files: Annotated[list[str], Argument(metavar="FILE...", help="Text, .jsonl, folders, .gz or .zst of them.")],
    tokenizer: Annotated[str, Option(help="byte, the path of a tokenizer.json, or train:VOCAB.")],
    output: Annotated[str, Option(metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.json.")],
    workers: Annotated[int | None, Option(help="Processes; default one per core.", min=1)] = None,
    key: Annotated[str, Option(help="Where the text is in a line of .jsonl.")] = "text",
    eod: Annotated[str | None, Option(help="The tokenizer's end-of-document token, if it isn't found by name.")] = None,
) -> None:
    """Tokenize files into a corpus."""
    from megalite.data.prepare import prepare

    print(prepare(files, tokenizer=tokenizer, output=output, workers=workers, key=key, eod=eod))


@data_app.command("inspect")
def data_inspect(prefix: Annotated[str, Argument(metavar="PREFIX", help="The corpus, with or without .bin.")]) -> None:
    """Describe a corpus."""
    from megalite.data.inspect import inspect

    print(inspect(prefix))


@checkpoint_app.command("inspect")
def checkpoint_inspect(directory: Annotated[str, Argument(metavar="DIR", help="A checkpoint, or a run.")]) -> None:
    """Describe a checkpoint: step, tensors, sizes, the layout it was saved under."""
    from megalite.checkpoint.command import inspect

    print(inspect(directory))


@checkpoint_app.command("verify")
def checkpoint_verify(directory: Annotated[str, Argument(metavar="DIR", help="A checkpoint, or a run.")]) -> None:
    """Check that a checkpoint is whole: hashes, sizes, every element once."""
    from megalite.checkpoint.command import verify

    print(verify(directory))


@kernels_app.command("list")
def kernels_list(
    device: Device = "auto", dtype: Annotated[str, Option(help="Compute dtype: bf16, fp32 or fp64.")] = "bf16"
) -> None:
    """Show each op's implementations, which one `auto` takes here, and why not the others."""
    from megalite.kernels.command import list_kernels

    print(list_kernels(device=device, dtype=dtype))


@kernels_app.command("check")
def kernels_check(
    ops: Ops = None,
    device: Device = "auto",
    dtype: Annotated[list[str] | None, Option(help="fp32, bf16, fp16 or fp64; may be repeated.")] = None,
) -> int:
    """Check every implementation that runs here against float64; exit code 1 when one is wrong."""
    from megalite.kernels.command import check_kernels

    return check_kernels(ops or [], device=device, dtypes=dtype or ["fp32", "bf16", "fp16"])


@kernels_app.command("bench")
def kernels_bench(
    ops: Ops = None,
    device: Device = "auto",
    dtype: Annotated[str | None, Option(help="Default bf16 on a GPU, fp32 on a CPU.")] = None,
    rounds: Annotated[int, Option(help="A number is the median of so many runs.", min=1)] = 15,
    compiled: Annotated[bool, Option("--compile/--no-compile", help="Also measure torch.compile.")] = True,
    tiny: Annotated[bool, Option("--tiny", help="Smallest sizes: a test of the benchmark, not of speed.")] = False,
    json_file: Annotated[str | None, Option("--json", metavar="FILE", help="Also write the numbers here.")] = None,
) -> None:
    """Measure every implementation that runs here against torch, on random data, as a share of the roofline."""
    from megalite.kernels.command import bench_kernels

    settings = {"rounds": rounds, "compiled": compiled, "tiny": tiny, "path": json_file}
    print(bench_kernels(ops or [], device=device, dtype=dtype, **settings))


@app.command()
def doctor() -> None:
    """Tell what was built, what runs on this machine, and why the rest does not."""
    from megalite.doctor import report

    print(report())


@config_app.command("show")
def config_show(
    config: ConfigPath,
    overrides: Overrides = None,
    yaml: Annotated[bool, Option("--yaml", help="Print YAML that loads as the same config.")] = False,
) -> None:
    """Print every value of a config and where it is from."""
    from megalite.config.load import dump, load
    from megalite.config.show import show

    loaded = load(config, overrides or [])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(dump(loaded.config).rstrip() if yaml else show(loaded, width=width))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a config."""
    from megalite.config.errors import json_schema

    print(json.dumps(json_schema(), indent=2))


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one message on stderr, without a traceback.

    Args:
        arguments: without the program's name; default those of this process.
    """
    try:
        code = app(args=arguments, prog_name="megalite", standalone_mode=False)
        sys.stdout.flush()
        if code == CLICK_INTERRUPTED:
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader of our output has left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_FAILED
    except Exception as error:
        _print_error(error)
        return _exit_code(error)


def entry() -> int:
    """`main` as a process: a rank that does not end with 0 ends at once."""
    from megalite.launch.child import end_now, started_by_launch

    code = main()
    groups = sys.modules.get("torch.distributed")
    in_a_job = started_by_launch(os.environ) or (groups and groups.is_available() and groups.is_initialized())
    return end_now(code) if code and in_a_job else code


def _exit_code(error: BaseException) -> int:
    """2 for mistakes of the user, the code of a SystemExit, else 1."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED if error.code else 0
    return EXIT_USER if isinstance(error, ValueError | UsageError) else EXIT_FAILED


def _print_error(error: Exception) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        return  # making the error has printed the help
    if isinstance(error, UsageError):
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        print(f"error: {error.format_message()}{where}", file=sys.stderr)
    elif isinstance(error, ValueError):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
