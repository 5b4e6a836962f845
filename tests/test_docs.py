"""What README, docs and docstrings say is executed."""

import asyncio
import csv
import dbm
import doctest
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import pytest
import torch
from package_modules import NAMES, import_or_skip
from releases import skip_without

import embedlayer
from embedlayer import families
from embedlayer.families import causal

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "gallery.md"], ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore:.*The rows start:UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec:FutureWarning", "ignore:.*does not have many workers"
)  # Lightning
def test_the_code_on_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, unchecked) -> None:
    if page.name == "using-it-with.md":
        pytest.importorskip("lightning", reason="lightning, of the dev extra, is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M):
        exec(compile(block, str(page), "exec"), names)


@cache
def unchanged_names() -> dict:
    """What docstring examples may use without saying so, and do not change: all but the model."""
    packages = [
        embedlayer,
        *(value for name in embedlayer.__all__ if inspect.ismodule(value := getattr(embedlayer, name))),
    ]
    names = {name: getattr(package, name) for package in packages for name in getattr(package, "__all__", ())}
    text = "the cat sat on the mat . " * 100
    tokenizer = embedlayer.train_tokenizer(text, "byte")
    corpus = embedlayer.TokenCorpus.from_text(text, tokenizer)
    return {**names, "torch": torch, "corpus": corpus, "tokenizer": tokenizer}


def example_names(*, with_model: bool) -> dict:
    """What docstring examples may use without saying so: torch, every public name, and a small model."""
    if not with_model:
        return unchanged_names()
    torch.manual_seed(0)
    table = embedlayer.TokenEmbedding(257, 16, scale="sqrt_dim")
    model = embedlayer.DecoderLM(table, embedlayer.RotaryEmbedding(8), num_layers=1, num_heads=2)
    return {**unchanged_names(), "model": model}


def has_examples(name: str) -> bool:
    """Whether the source of a module has an example."""
    file = ROOT.joinpath(*name.split("."))
    return any(">>> " in path.read_text() for path in (file.with_suffix(".py"), file / "__init__.py") if path.exists())


@pytest.mark.parametrize("name", [*filter(has_examples, NAMES)])
def test_the_examples_in_docstrings_run(name, tmp_path, monkeypatch, request) -> None:
    if not request.config.getoption("--all"):
        request.getfixturevalue("unchecked")
    if name == "embedlayer.inputs.ngram":
        skip_without("transformers:Qwen4ExpTextConfig")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linecache.checkcache", lambda _=None: None)  # of all files that were read, for each docstring
    module = import_or_skip(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    with_model = any("model" in example.source for test in tests for example in test.examples)
    names = example_names(with_model=with_model) | vars(module)
    for test in tests:
        test.globs.update(names)
        runner.run(test)
    assert runner.failures == 0


def test_a_section_that_an_error_names_is_there() -> None:
    sections = set(re.findall("^## (.*)$", (ROOT / "docs" / "errors.md").read_text(), flags=re.M))
    code = "".join(file.read_text() for file in (ROOT / "embedlayer").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)
    assert set(re.findall(r'docs/errors\.md, ([^".]+)\."', code)) <= sections


def test_the_example_in_the_readme_is_the_file() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- the file examples/quickstart.py.*?```python\n(.*?)^```", readme, flags=re.S | re.M).group(
        1
    )
    file = (ROOT / "examples" / "quickstart.py").read_text()
    assert file.partition('"""\n\n')[2] == block


WRITTEN = ["head_outputs", "head_precision", "row_state", "source_tree", "stored_formats", "tokenizer_classes"]
WRITTEN += ["tokenizer_pairs", "trl_trainers"]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_tables_that_a_script_writes_are_of_today(name, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    command = importlib.import_module(name)
    assert command.PAGE.read_text() == command.page(), f"run: python docs/{name}.py --write"


def test_the_table_of_projects_is_the_results_for_the_requirements_of_today() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "installation.py"))
    results = json.loads(module["RESULTS"].read_text())
    again = "run: python docs/installation.py --resolve --run FOLDER --write"
    assert results["requirements"] == module["requirements"]("hf"), again
    assert "not run" not in module["table"](results), again
    assert module["PAGE"].read_text() == module["page"](), "run: python docs/installation.py --write"
    count = sum(each["installs"] == "embedlayer[hf]" for each in results["projects"].values())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"installs beside {count} of {len(results['projects'])} trainers and servers" in readme


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/recipes.md"])
def test_the_numbers_on_a_page_are_rows_of_the_results(page) -> None:
    text = (ROOT / page).read_text()
    table = re.search(r"<!-- numbers -->\n(.*?)<!-- end of numbers -->", text, flags=re.S).group(1)
    checked = 0
    for line in table.splitlines()[2:]:
        *_, theirs, ours, row = (cell.strip() for cell in line.strip("|").split("|"))
        file, _, conditions = row.replace("`", "").partition(": ")
        wanted = dict(condition.strip().split("=") for condition in conditions.split(";"))
        with (ROOT / "benchmarks" / "results" / file).open() as handle:
            found = [r for r in csv.DictReader(handle) if all(r[key] == value for key, value in wanted.items())]
        by_competitor: dict[str, list[float]] = {}
        for r in found:
            if r["time_ms"] and r.get("busy_processes") in (None, "", "0"):  # a peer may not be installed
                by_competitor.setdefault(r["competitor"], []).append(float(r["time_ms"]))
        times = {f"{median(runs):.3g}" for runs in by_competitor.values()}
        for cell in (theirs, ours):
            number = float(cell.removesuffix(" ms").replace(",", ""))
            assert f"{number:.3g}" in times, f"{cell} of {line} is not in {file}"
            checked += 1
    assert checked


@pytest.mark.parametrize(
    "name", ["operations", "targets", "compilation", "measured", pytest.param("predictions", marks=pytest.mark.long)]
)
def test_the_tables_about_kernels_are_those_of_the_command(name) -> None:
    pytest.importorskip("triton")
    with_table = runpy.run_path(str(ROOT / "docs" / "kernels.py"))["with_table"]
    text = (ROOT / "docs" / "kernels.md").read_text()
    assert text == with_table(text, name), "run python docs/kernels.py --write"


def test_the_page_about_kernels_names_every_mistake_that_is_made_on_purpose() -> None:
    page = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    mistakes = runpy.run_path(str(ROOT / "tests" / "kernels" / "gpu" / "test_mistakes.py"))["MISTAKES"]
    assert mistakes
    assert not [mistake for mistake in mistakes if mistake not in page]


def test_the_files_in_contributing_work_as_printed(tmp_path, monkeypatch) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    record = re.search(r"^The record, in `CAUSAL_FAMILIES` .*?```python\n(.*?)^```", page, flags=re.S | re.M)[1]
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, eval(record, vars(causal))))
    files = re.findall(r"^The file `([\w/.]+)`:\n\n```python\n(.*?)^```", page, flags=re.S | re.M)
    assert [name.partition("/")[0] for name, _ in files] == [*("embedlayer", "tests") * 2, "tests"]
    tests = []
    for name, text in files:
        path = tmp_path / Path(name).name
        path.write_text(text)
        module_name = name.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module_name, module)
        spec.loader.exec_module(module)
        tests += [test for name, test in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 7
    for test in tests:
        folder = tmp_path / f"{test.__module__}.{test.__name__}"
        folder.mkdir()
        test(**({"tmp_path": folder} if "tmp_path" in inspect.signature(test).parameters else {}))


def test_the_changelog_knows_the_version() -> None:
    assert f"## {embedlayer.__version__}" in (ROOT / "CHANGELOG.md").read_text()


EXAMPLES = """
    quickstart.py
    output_variance.py
    tied_or_untied.py --steps 1
    width_and_tying.py --steps 1
    rates_by_width.py --steps 1 --widths 64 --rates 0.01
    beyond_the_trained_length.py --steps 1 --windows 1 --lengths 128
    another_tokenizer.py --seeds 2 --steps 1 --teacher-steps 1 --teacher-bytes 12000 --student-bytes 800 --held-out-bytes 300
    domain_terms.py --count 5
    suggested_tokens.py --count 5
    compression.py vectors.vec --choices rank=2
    onnx_table.py --vocab-size 100
    log_ratios.py --tokens 8
"""  # noqa: E501
LONG_EXAMPLES = """
    killed_and_resumed.py --rows 20000
    added_tables.py --minutes 0.01
    starting_rows.py --steps 1 --terms 5 --row-steps 1 --passages 1
    compression.py --choices rank=96
    packed_documents.py --minutes 0.01 --shortest 60
    packed_documents_memory.py --tokens 64
"""
NOT_RUN = {
    "tables.py",  # a helper
    "gguf_in_llama_cpp.py",  # needs llama-cpp-python, which builds llama.cpp
    "gallery.py",  # run by test_gallery.py
    "context_parallel.py",  # run by distributed/test_sequence.py
}


@pytest.mark.parametrize(
    "line",
    [
        *EXAMPLES.strip().splitlines(),
        *(pytest.param(line, marks=pytest.mark.long) for line in LONG_EXAMPLES.strip().splitlines()),
    ],
)
@pytest.mark.filterwarnings("ignore:.*The rows start:UserWarning")
def test_an_example_runs(line, tmp_path, monkeypatch, unchecked, capsys, request) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vectors.vec").write_text("4 3\na 1 0 0\nb 0 1 0\nc 0 0 1\nd 1 1 1\n")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", line.split())
    if not request.node.get_closest_marker("long"):  # less text, and one block
        text = "\n\n".join(topics[name] for name in sorted(topics))[:13_900]
        monkeypatch.setattr("pydoc_data.topics.topics", {"": text})
        options, few = embedlayer.TrainingOptions, {"batch_size": 2, "validation_tokens": 128}
        monkeypatch.setattr(embedlayer, "TrainingOptions", lambda **given: options(**given | few))
        build, one = embedlayer.DecoderLM.__init__, {"num_layers": 1}
        monkeypatch.setattr(embedlayer.DecoderLM, "__init__", lambda *parts, **given: build(*parts, **given | one))
        monkeypatch.setattr(asyncio, "__file__", dbm.__file__)  # whose sources are shorter
    runpy.run_path(str(ROOT / "examples" / line.split()[0]), run_name="__main__")
    assert capsys.readouterr().out


def test_every_example_is_run_here_or_is_a_helper() -> None:
    run = {line.split()[0] for line in (EXAMPLES + LONG_EXAMPLES).splitlines() if line.strip()}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == run | NOT_RUN


def test_the_table_of_checkpoints_is_made(monkeypatch, unchecked, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "GPT-2", "T5 1.1"])
    runpy.run_path(str(ROOT / "tools" / "checkpoints.py"), run_name="__main__")
    assert "| GPT-2 |" in capsys.readouterr().out


def test_a_page_that_includes_a_script_links_it_for_readers_of_a_checkout() -> None:
    included = [(page, path) for page in PAGES for path in re.findall(r"{literalinclude} (\S+)", page.read_text())]
    assert included
    for page, path in included:
        assert f"]({path})" in page.read_text(), f"{page.name} does not link {path}"
        assert (page.parent / path).is_file()


def test_every_public_name_is_in_the_api_reference(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    packages = re.findall(r"public-names:: ([\w.]+)", pages)
    assert {*re.findall(r'`make docs`\); in a checkout `help\("([\w.]+)\.NAME"\)`', pages)} == {*packages}
    documented = {path for package in packages for path in conf["public_names"](package)}
    subpackages = {name for name in embedlayer.__all__ if inspect.ismodule(getattr(embedlayer, name))}
    assert {path.split(".")[1] for path in packages} == subpackages
    assert {f"embedlayer.{name}" for name in set(embedlayer.__all__) - subpackages} <= documented
    for package in subpackages:
        own = {*getattr(getattr(embedlayer, package), "__all__", ())} - {*embedlayer.__all__}
        assert {f"embedlayer.{package}.{name}" for name in own} <= documented
