"""How the user can type the `embedlayer` command, for messages that contain commands."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def command_name() -> str:
    """Return the words before a subcommand, as the process was started: a user can type what is printed."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py" and program.parent.name == "embedlayer":
        python = Path(sys.executable)
        return f"{_typed(python, 'python', 'python3', python.name)} -m embedlayer"
    return _typed(program, "embedlayer") if program.stem == "embedlayer" else "embedlayer"


def command_line(*words: object) -> str:
    """Return a command of `embedlayer`, from its subcommand and arguments, as a line to type, quoted for a shell."""
    return " ".join([command_name(), *(word if word == "..." else shlex.quote(word) for word in map(str, words))])


def _typed(program: Path, *names: str) -> str:
    """Return the first name by which the shell finds a program in the same folder, else the program's path, quoted."""
    folder = Path(os.path.abspath(program)).parent
    for name in names:
        command = shutil.which(name)
        if command is not None and Path(os.path.abspath(command)).parent == folder:
            return name
    path = folder / program.name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
