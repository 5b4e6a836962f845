"""Write which projects install beside the package, and whether it works with their transformers, into docs/versions.md.

    python docs/installation.py --resolve     # resolve the newest release of each project with ours: network and uv
    python docs/installation.py --run FOLDER  # check the families with each transformers release: network and pip
    python docs/installation.py --write       # write the table from installation.json: no network

`--resolve` reads metadata only: nothing is installed. `--run` installs each transformers release into a subfolder of
FOLDER; torch is the one of the environment that runs the command. `--check` checks the installed transformers.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]
from tables import between_markers, markdown_table, write_between_markers  # noqa: E402

PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "docs" / "installation.json"
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_35"

PROJECTS = {
    "axolotl": "axolotl",
    "unsloth": "unsloth",
    "LLaMA-Factory": "llamafactory",
    "TRL": "trl",
    "verl": "verl",
    "NeMo Automodel": "nemo-automodel",
    "torchtitan": "torchtitan",
    "vLLM": "vllm",
    "SGLang": "sglang",
    "sentence-transformers": "sentence-transformers",
    "lm-eval": "lm-eval",
    "LLM Compressor": "llmcompressor",
    "mergekit": "mergekit",
    "nanochat": "",
    "LitGPT": "litgpt",
    "Lightning": "lightning",
    "accelerate": "accelerate",
    "PEFT": "peft",
}
"""Project -> name of its distribution; empty for nanochat, as the one of that name has other requirements."""

NANOCHAT_COMMIT = "004081f"
NANOCHAT = [
    "datasets>=4.0.0",
    "fastapi>=0.117.1",
    "filelock>=3.0.0",
    "ipykernel>=7.1.0",
    "kernels>=0.11.7",
    "matplotlib>=3.10.8",
    "psutil>=7.1.0",
    "python-dotenv>=1.2.1",
    "regex>=2025.9.1",
    "rustbpe>=0.1.0",
    "scipy>=1.15.3",
    "setuptools>=80.9.0",
    "tabulate>=0.9.0",
    "tiktoken>=0.11.0",
    "tokenizers>=0.22.0",
    "torch==2.9.1",
    "transformers>=4.57.3",
    "uvicorn>=0.36.0",
    "wandb>=0.21.3",
    "zstandard>=0.25.0",
]
"""Requirements in the pyproject.toml of karpathy/nanochat at that commit."""

FAMILIES = {
    "GPT-2": ("gpt2", "causal"),
    "LLaMA": ("llama", "causal"),
    "Qwen3": ("qwen3", "causal"),
    "Gemma 2": ("gemma2", "causal"),
    "BERT": ("bert", "masked"),
    "T5": ("t5", "seq2seq"),
    "OLMo 2": ("olmo2", "causal"),
    "Phi-3": ("phi3", "causal"),
}
"""Family -> model type and kind, as in `tiny_models.build`."""


def requirements(*extras: str) -> list[str]:
    """Return the requirements of the package in pyproject.toml, with those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(each for name in extras for each in project["optional-dependencies"][name])]


def compiled(wanted: Sequence[str], *options: str) -> dict[str, str] | str:
    """Return the versions to which uv resolves requirements, or the first requirement that uv's refusal names."""
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not on PATH; install it with: pip install uv")
    # Some packages, such as OpenTelemetry's, have no release that is not a pre-release.
    command = [uv, "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--prerelease", "if-necessary"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, *options]
    result = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True)
    if result.returncode == 0:
        return dict(line.split("==", 1) for line in result.stdout.splitlines() if "==" in line)
    text = " ".join(result.stderr.split())
    reason = re.search(r"No solution found .*?Because (.+? depends on .+?) and ", text)
    if reason is None:
        raise SystemExit(f"uv resolved nothing, and names no requirement: {result.stderr}")
    return reason[1]


def resolved(name: str) -> dict[str, str]:
    """Return the newest release of a project, and what it resolves to beside the package, with `hf` or without."""
    if name:
        newest = compiled([name], "--no-deps")
        if isinstance(newest, str):
            raise SystemExit(f"{name} has no release for Python {PYTHON}: {newest}")
        release, wanted = newest[name], [f"{name}=={newest[name]}"]
    else:
        release, wanted = f"commit {NANOCHAT_COMMIT}", NANOCHAT
    conflict = ""
    for extras in (["hf"], []):
        versions = compiled([*wanted, *requirements(*extras)])
        if not isinstance(versions, str):
            installs = "embedlayer[hf]" if extras else "embedlayer"
            shown = {key: versions.get(key, "") for key in ("torch", "transformers")}
            return {"release": release, "installs": installs, "conflict": conflict, **shown}
        conflict = versions
    return {"release": release, "installs": "", "conflict": conflict, "torch": "", "transformers": ""}


def check_edit(model_type: str, kind: str) -> str:
    """Add a token to the folder of a small model, and return what transformers then reads otherwise, if anything."""
    import torch
    from tiny_models import VOCAB, build
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    import embedlayer as el

    _, model = build(model_type, kind)
    words = Tokenizer(models.WordLevel({f"word{number}": number for number in range(VOCAB)}, unk_token="word0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        model.save_pretrained(before)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word0").save_pretrained(before)
        el.vocab.add_tokens(before, ["zebra"], out=after)
        opened = type(model).from_pretrained(after)
        ids = PreTrainedTokenizerFast.from_pretrained(after)("word5 zebra", add_special_tokens=False)["input_ids"]
    if ids != [5, VOCAB]:
        return f"edit: the IDs are {ids}"
    for part in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(model, part)().weight, getattr(opened, part)().weight
        if len(new) != VOCAB + 1 or not torch.equal(new[:VOCAB], old):
            return f"edit: rows of {part} differ"
    return ""


def check() -> dict[str, str]:
    """Return the result for each family with the installed torch and transformers, and the versions."""
    import torch
    import transformers
    from all_families import examine
    from tiny_models import quiet

    results = {"python": "{}.{}".format(*sys.version_info), "torch": torch.__version__.partition("+")[0]}
    results["transformers"] = transformers.__version__
    for family, (model_type, kind) in FAMILIES.items():
        try:
            with quiet():
                row = examine(model_type, kind)
                fault = f"{row.verdict}: {row.reason}" if row.verdict != "equal" else check_edit(model_type, kind)
        except Exception as error:  # noqa: BLE001 (any error is the result)
            fault = f"{type(error).__name__}: {error}".partition("\n")[0]
        results[family] = fault or "equal"
    return results


def run(version: str, folder: Path) -> dict[str, str]:
    """Install a release of transformers into a subfolder, and return the result for each family there."""
    target = folder.resolve() / f"transformers-{version}"
    if not target.exists():
        wanted = [each for each in requirements("hf") if not each.startswith(("torch", "transformers"))]
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        subprocess.run([*install, f"transformers=={version}", *wanted], check=True)
    paths = [str(target), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, __file__, "--check"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    results: dict[str, str] = json.loads(output.splitlines()[-1])
    if results.pop("transformers") != version:
        raise SystemExit(f"{target} has another transformers than {version}: remove it")
    return results


def table(results: dict[str, Any]) -> str:
    """Return the table of projects, and what it was made with."""
    rows = []
    for project, found in results["projects"].items():
        beside = f"`{found['installs']}`" if found["installs"] else "no"
        beside += f"; {found['conflict']}" * bool(found["conflict"])
        works = "-"
        if found["installs"] == "embedlayer[hf]":
            checked = results["families"].get(found["transformers"], {})
            faults = [f"{family}: {checked[family]}" for family in FAMILIES if checked.get(family, "equal") != "equal"]
            works = f"{len(FAMILIES) - len(faults)} of {len(FAMILIES)}" if checked else "not run"
            works += "".join(f"; {fault}" for fault in faults)
        versions = {key: found[key] or "-" for key in ("release", "torch", "transformers")}
        rows.append({"project": project, **versions, "installs beside": beside, "works": works.replace("|", "\\|")})
    count = sum(found["installs"] == "embedlayer[hf]" for found in results["projects"].values())
    used = {f"Python {checked['python']} and torch {checked['torch']}" for checked in results["families"].values()}
    return (
        f"`embedlayer[hf]` installs beside {count} of {len(rows)} projects. Resolved on {results['date']} for Python "
        f"{PYTHON}; families checked with {', '.join(sorted(used))} on a CPU.\n\n{markdown_table(rows)}"
    )


def page() -> str:
    """Return the text of the page with the committed results."""
    return between_markers(PAGE, "installation", table(json.loads(RESULTS.read_text(encoding="utf-8"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--run", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        print(json.dumps(check()))
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"families": {}}
    if arguments.resolve:
        projects = {project: resolved(name) for project, name in PROJECTS.items()}
        made = {"date": str(date.today()), "requirements": requirements("hf"), "projects": projects}
        results = {**made, "families": results["families"]}
    if arguments.run:
        pinned = [each["transformers"] for each in results["projects"].values() if each["installs"] == "embedlayer[hf]"]
        versions = sorted({*pinned}, key=lambda version: [*map(int, version.split("."))])
        results["families"] = {version: run(version, arguments.run) for version in versions}
    if arguments.resolve or arguments.run:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if arguments.write:
        write_between_markers(PAGE, "installation", table(results))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
