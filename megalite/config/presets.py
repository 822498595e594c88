"""Where the shipped configs are: `configs/` of a checkout, or `megalite/presets` of an installed package."""

import difflib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def preset_dir() -> Path:
    """The folder with the shipped configs; packaging copies configs/ to megalite/presets."""
    installed = PACKAGE / "presets"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def preset_names() -> list[str]:
    """Names that `load_config` takes in place of a path."""
    return sorted(path.stem for path in preset_dir().glob("*.yaml"))


def find_config(name: str, *, beside: Path | None = None) -> Path:
    """The file that `name` means: a path (relative to the folder `beside`, or to the working directory) or a preset.

    A name for which there is neither comes back as a path, for the reader to complain about.
    """
    path = Path(name) if beside is None else beside / name
    if not path.is_file() and name in preset_names():
        return preset_dir() / f"{name}.yaml"
    return path


def near_names(name: str, known: list[str]) -> list[str]:
    """The known names that `name` may be a typing error of, best first."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.65)
