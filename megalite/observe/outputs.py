"""Whether what a user wants written can be written, asked before the work whose result it is.

Each question is put to the file system, not derived from modes; it leaves nothing behind.
"""

import tempfile
from pathlib import Path


def check_output_file(option: str, path: str | Path) -> None:
    """Refuse a file that can't be written; `option` is what gave its name.

    Raises:
        ValueError: the option, the path, and why.
    """
    path = Path(path)
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {path} can't be written: {error.strerror}; give the name of a file in a folder that exists and "
            "can be written to"
        ) from None


def check_output_folder(setting: str, path: str | Path) -> None:
    """Refuse a folder, to be made with its parents, in which no file can be written; `setting` is what asks for it.

    Raises:
        ValueError: the setting, the folder at fault, and why.
    """
    nearest = Path(path).absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(
            f"{setting}: {nearest} is not a folder that can be written to ({error.strerror}); choose another"
        ) from None
