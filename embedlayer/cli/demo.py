"""`embedlayer demo`: train on text that every Python installation contains."""

from pathlib import Path

import click

from embedlayer.cli.options import OutputPath, json_option
from embedlayer.core.errors import FileError
from embedlayer.core.formatting import command_line
from embedlayer.io.files import write_text
from embedlayer.io.partials import temporary_folder

PROBES = (" must", " returns", " called", " string", " method", " argument", " if", " function")
"""Tokens whose neighbours are shown; each occurs more than 50 times in the text."""


def carried_text() -> str:
    """Return a text that every Python installation contains, for the command `demo` to train on."""
    # The language reference that `help()` shows, or the docstrings of the standard library if a distribution omits it.
    try:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    except ImportError:
        import ast
        import sysconfig

        docstrings = []
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            docstrings += [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        return "\n\n".join(text for text in docstrings if text)


@click.command()
@click.option("-o", "--output", type=OutputPath(), default=Path("out/demo"), help="Run folder.")
@click.option("--minutes", default=1.4, help="Minutes to train.")
@click.option("--min-steps", default=300, help="Smallest number of steps, also if they take longer than --minutes.")
@click.option("--steps", type=int, help="Number of steps instead of a time.")
@json_option
@click.pass_context
def demo(context: click.Context, output: Path, minutes: float, min_steps: int, steps: int | None, as_json: bool) -> int:
    """Train a small layer on the Python manual.

    The text is the Python language reference. At the end the nearest neighbours of some tokens are shown, and what the
    table learned.
    """
    from embedlayer.cli.train import train
    from embedlayer.training.run_directory import RunDirectory

    run, text = RunDirectory(output), output / "python-reference.txt"
    if not (run.is_free or (run.contains_run and text.exists())):
        raise FileError(f"{output} holds other files than a demo, which would be replaced. Choose another folder.")
    if not as_json:
        duration = f"{minutes:g} minutes, longer on a busy or slow machine: at least {min_steps} steps"
        click.echo(f"Training a small layer on the Python manual ({duration if steps is None else f'{steps} steps'})")
    with temporary_folder() as folder:
        source, content = folder / text.name, carried_text()
        write_text(source, content)
        try:
            result: int = context.invoke(
                train,
                files=(source,),
                output=output,
                overwrite=run.contains_run,
                minutes=None if steps is not None else minutes,
                min_steps=min_steps,
                steps=steps,
                probe=PROBES,
                as_json=as_json,
            )
        finally:
            if run.contains_run:  # a run beside this text is one that a demo may replace
                write_text(text, content)
    if result == 0 and not as_json:
        commands = (
            command_line("explore", output, "--words"),
            command_line("embed", output, "for name in names"),
            command_line("neighbors", output, " class"),
            command_line("generate", output, "A function is"),
        )
        click.echo(f"\nLook at {output / 'report.html'} in a browser, or try:")
        click.echo("\n".join(f"  {command}" for command in commands))
        click.echo(f"More time gives better neighbours: {command_line('demo', '-o', output, '--minutes', 5)}")
    return result
