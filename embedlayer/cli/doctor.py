"""`embedlayer doctor`: which implementation computes each operation on this machine, and why."""

import logging
import platform
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, NamedTuple

import click

from embedlayer import __version__
from embedlayer.cli.options import json_option
from embedlayer.cli.printing import make_console, print_facts, print_json, print_line, print_table
from embedlayer.core.formatting import count_of, format_bytes

if TYPE_CHECKING:
    import torch

    from embedlayer.kernels.operation import Operation

COMPILERS = {"cpu": "numba", "cuda": "Triton"}
"""What compiles the kernels of a device."""


class Answer(NamedTuple):
    """What computes an operation on a device.

    Attributes:
        implementation: `"numba"`, `"Triton"` or `"torch"`, which stands for torch operators; `None` if the device
            cannot be used.
        kernels: Names of the compiled kernels.
        reason: Why torch operators compute it, or why the device cannot be used; otherwise empty.
    """

    implementation: str | None
    kernels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Device:
    """A device, and what computes each operation there.

    Attributes:
        device: Its name, such as `"cpu"` or `"cuda:0"`.
        name: Architecture of the CPU, or model of the GPU.
        details: Instructions and threads, or memory and compute capability.
        dtypes: Floating-point dtypes that compiled kernels take there.
        failure: Why compiled kernels, or the device itself, cannot be used, with what to install; otherwise empty.
        answers: One for each of `OPERATIONS`.
    """

    device: str
    name: str
    details: str
    dtypes: tuple[str, ...]
    failure: str
    answers: tuple[Answer, ...]


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show which implementation computes each operation on this machine, and why.

    An operation is computed by a kernel that numba compiles for the CPU, by a kernel that Triton compiles for CUDA, or
    by torch operators. The first run compiles a small kernel for each device. What is missing is named, with the line
    that installs it.

    \b
    embedlayer doctor
    embedlayer doctor --json
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.cli.operations import OPERATIONS

    with _log_off(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the driver, which `gpu_problem` returns
        versions, problem = package_versions(), gpu_problem()
        devices = [examined(device) for device in usable_devices()]
    advice = list(dict.fromkeys(each for each in (problem, *(device.failure for device in devices)) if each))
    if as_json:
        operations = [
            {
                "operation": each.what,
                "definition": each.definition_name,
                "on": {device.device: device.answers[place]._asdict() for device in devices},
            }
            for place, each in enumerate(OPERATIONS)
        ]
        described = [{name: x for name, x in asdict(each).items() if name != "answers"} for each in devices]
        print_json({"versions": versions, "devices": described, "operations": operations, "advice": advice}, indent=2)
    else:
        show(versions, devices, OPERATIONS, problem)


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that compute; `None` for one that cannot be imported."""
    import torch

    versions: dict[str, str | None] = {"embedlayer": __version__, "Python": platform.python_version()}
    versions |= {"torch": torch.__version__, "CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    for name, package in (("numba", "numba"), ("Triton", "triton")):
        try:
            versions[name] = import_module(package).__version__
        except (ImportError, OSError, RuntimeError):
            versions[name] = None
    return versions


def usable_devices() -> "list[torch.device]":
    """Return the CPU, and each device of the accelerator that torch is built for, such as CUDA or MPS."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kind = "" if accelerator is None else accelerator.type
    return [torch.device("cpu"), *(torch.device(kind, each) for each in range(torch.accelerator.device_count()))]


def gpu_problem() -> str:
    """Return why torch finds no GPU of NVIDIA on a machine that has the driver of one; otherwise an empty string."""
    import torch

    has_driver = Path("/proc/driver/nvidia/version").exists() or which("nvidia-smi") is not None
    if not has_driver or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        release = torch.__version__.partition("+")[0]
        return (
            f"This machine has a driver of NVIDIA, and torch {torch.__version__} is built without CUDA. On Linux: "
            f"pip install --force-reinstall --index-url https://pypi.org/simple torch=={release}"
        )
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f"torch finds no GPU of NVIDIA: {error}".splitlines()[0]
    return ""


def examined(device: "torch.device") -> Device:
    """Return what computes each operation on a device, after compiling a small kernel there."""
    import torch

    from embedlayer.cli.operations import OPERATIONS
    from embedlayer.core.devices import device_kind
    from embedlayer.kernels.operation import cpu_failure

    described = str(device), *name_and_details(device)
    try:
        x = torch.zeros(1, device=device)
    except RuntimeError as error:  # its memory is full, or torch has no code for it
        failure = f"{device} cannot be used: {error}".splitlines()[0]
        return Device(*described, (), failure, (Answer(None, (), failure),) * len(OPERATIONS))
    if device_kind(device) == "cpu":
        cpu_failure()
    kind = device_kind(device)
    answers, compiled = [], []
    for each in OPERATIONS:
        kernels = each.kernels.get(kind, ())
        reason = each.refusal(x)
        answers.append(Answer("torch", (), reason) if reason else Answer(COMPILERS[kind], kernels, ""))
        compiled += [each] if kernels else []
    floats = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    dtypes = [dtype for dtype in floats if compiled and not compiled[0].refusal(x.to(dtype))]
    failure = compiled[0].refusal(x) if compiled else ""
    return Device(*described, tuple(str(each).removeprefix("torch.") for each in dtypes), failure, tuple(answers))


def name_and_details(device: "torch.device") -> tuple[str, str]:
    """Return the name of a device, and what else is known of it, in a few words."""
    import torch

    from embedlayer.losses.rows import product_dtype

    if device.type == "cpu":
        details = f"{torch.backends.cpu.get_cpu_capability()}, {count_of(torch.get_num_threads(), 'thread')}"
        if product_dtype(torch.bfloat16, "cpu") == torch.float32:
            details += ", products of bfloat16 are computed in float32"
        return platform.machine(), details
    if device.type != "cuda":
        return device.type, ""
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    return properties.name, f"{format_bytes(properties.total_memory)}, {capability}"


def show(versions: dict[str, str | None], devices: list[Device], operations: "list[Operation]", problem: str) -> None:
    """Print the versions, the devices, a table of all operations, and why torch operators compute some of them."""
    console = make_console()
    groups = grouped(devices)
    built = next((f"built for {name} {versions[name]}" for name in ("CUDA", "ROCm") if versions[name]), "without CUDA")
    print_line(console, f"embedlayer {versions['embedlayer']} on Python {versions['Python']}, {platform.system()}")
    facts = [("torch", str(versions["torch"]), built)]
    facts += [(name, versions[name] or "none", "") for name in COMPILERS.values()]
    for label, each in groups:
        dtypes = f"kernels take {', '.join(each.dtypes)}" if each.dtypes else "no kernels"
        facts.append((label, each.name, f"{each.details}; {dtypes}"))
    print_facts(console, facts if len(devices) > 1 else [*facts, ("GPU", "none", "")])
    click.echo()
    print_line(console, "What computes each operation: kernels of numba or Triton, or torch operators")
    lines = [
        [*(each.answers[place].implementation or "-" for _, each in groups), operation.what.replace("`", "")]
        for place, operation in enumerate(operations)
    ]
    columns = [*(label for label, _ in groups), "operation"]
    print_table(console, columns, lines, left=range(len(columns)), long="operation", wrap=True)
    click.echo()
    print_line(console, "Where no kernel computes, and why")
    if problem:
        click.echo(f"  GPU:\n    {problem}")
    for label, each in groups:
        for reason, number in Counter(answer.reason for answer in each.answers if answer.reason).most_common():
            click.echo(f"  {label}, {number} of {count_of(len(operations), 'operation')}:\n    {reason}")


def grouped(devices: list[Device]) -> list[tuple[str, Device]]:
    """Return one device for each run of equal ones, with the name of all: `"cuda:0-7"`."""
    groups = []
    for _, equal in groupby(devices, key=lambda each: replace(each, device="")):
        first, *others = equal
        last = f"-{others[-1].device.rpartition(':')[2]}" if others else ""
        groups.append((first.device + last, first))
    return groups


@contextmanager
def _log_off() -> Iterator[None]:
    """Print nothing of the log in a `with` block: the reasons why kernels are off are part of the result."""
    log = logging.getLogger("embedlayer")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
