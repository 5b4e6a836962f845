"""Train a student on little text, alone and with a teacher whose tokenizer is another one; compare bits per byte.

    python examples/another_tokenizer.py --text FILE --write docs/two-tokenizers.md

trains the teacher once, on the first `--teacher-bytes` of the text. Each seed trains students on the next
`--student-bytes`, which the teacher has not read, each seed on other ones. All are compared on the end of the text. The
weight of the teacher's loss beside the cross-entropy is 1. Time is CPU time of the process, all threads together, so
that other programs do not change it; it includes the teacher's pass over the student's text, and no evaluation.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from tables import markdown_table, write_between_markers
from tokenizers import Tokenizer
from torch import Tensor

import embedlayer as el
from embedlayer.analysis import CausalModel, evaluate_text
from embedlayer.cli.demo import carried_text
from embedlayer.data import WindowSampler
from embedlayer.heads import DraftMap
from embedlayer.losses import NextByte, NextBytes, chunk_log_probs, divergence
from embedlayer.optim import clip_grad_norm_, param_groups
from embedlayer.tokenization import align_tokens, token_spans

LENGTH, CHECKPOINTS = 128, 9


def decoder(vocab_size: int, width: int, layers: int) -> el.DecoderLM:
    table = el.TokenEmbedding(vocab_size, width, scale="sqrt_dim")
    return el.DecoderLM(table, "rotary", num_layers=layers, num_heads=width // 32)


@torch.no_grad()
def hidden_states(model: el.DecoderLM, ids: Tensor) -> Tensor:
    """Return the hidden state at each token, `(T, D)`, from at least half a window before it but at the start."""
    half, states = LENGTH // 2, model.hidden(ids[:LENGTH])
    for start in range(half, len(ids) - half, half):
        states = torch.cat([states, model.hidden(ids[start : start + LENGTH])[half:]])
    return states


class Lesson:
    """What a student learns from: a text in its tokens, and a teacher's hidden states at the cuts that both have.

    The methods are losses beside the cross-entropy. Their arguments are the student's model, its hidden states, its
    log-probabilities of the next tokens, and the places of its inputs in the text, `(B, T)`.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, teacher: el.DecoderLM, teacher_tokenizer: Tokenizer) -> None:
        started = time.process_time()
        ours, theirs = token_spans(tokenizer, text), token_spans(teacher_tokenizer, text)
        self.ids, self.head, self.alignment = ours.ids, teacher.head, align_tokens(ours, theirs)
        states = hidden_states(teacher, theirs.ids)
        with torch.no_grad():
            self.chunk_log_probs = chunk_log_probs((states, teacher.head), theirs.ids, self.alignment, side="b")

        before = self.alignment.a.tokens_before, self.alignment.b.tokens_before
        is_lesson = self.alignment.exact & (before[0] >= 0) & (before[1] >= 0)
        self.states = states[before[1].clamp(min=0)]  # of each chunk, at the cut before it
        self.chunk_after = torch.full_like(self.ids, -1).index_put((before[0][is_lesson],), is_lesson.nonzero()[:, 0])
        self.next_byte = NextByte(NextBytes.of(tokenizer), NextBytes.of(teacher_tokenizer))
        self.shared = DraftMap.between(tokenizer, teacher_tokenizer)
        self.seconds = time.process_time() - started

    def next_bytes(self, model: el.DecoderLM, hidden: Tensor, log_probs: Tensor, places: Tensor) -> Tensor:
        """The divergence of the next byte, at each cut that both tokenizers have."""
        chunks = self.chunk_after[places]
        states = self.states[chunks[chunks >= 0]]
        return divergence((hidden[chunks >= 0], model.head), (states, self.head), self.next_byte)

    def shared_tokens(self, model: el.DecoderLM, hidden: Tensor, log_probs: Tensor, places: Tensor) -> Tensor:
        """The divergence over the shared tokens and one event for all others, where a token follows for a token."""
        chunks = self.chunk_after[places]
        is_single = (chunks >= 0) & self.alignment.single[chunks]
        return self.shared.divergence((hidden[is_single], model.head), (self.states[chunks[is_single]], self.head))

    def chunks(self, model: el.DecoderLM, hidden: Tensor, log_probs: Tensor, places: Tensor) -> Tensor:
        """The divergence between the probabilities of a chunk and of all else (ALM, at temperature 1)."""
        size = self.alignment.starts.numel()
        chunk_of = self.alignment.a.chunk_of[places + 1] + size * torch.arange(len(places)).unsqueeze(1)
        ours = torch.zeros(len(places) * size).index_add(0, chunk_of.flatten(), log_probs.flatten())
        tokens = torch.zeros(len(places) * size).index_add(0, chunk_of.flatten(), torch.ones(chunk_of.numel()))
        # not those of which a token is the first of its window, or outside of it
        is_whole = (tokens.view(-1, size) == self.alignment.a.num_tokens) & self.alignment.exact
        both = ours.view(-1, size), self.chunk_log_probs.expand(len(places), -1)
        log_q, log_p = (each[is_whole].clamp(max=-1e-6) for each in both)
        other_q, other_p = ((-each.expm1()).log() for each in (log_q, log_p))
        return (log_p.exp() * (log_p - log_q) + other_p.exp() * (other_p - other_q)).mean()


Loss = Callable[[el.DecoderLM, Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Callable[[Lesson], Loss]] = {
    "next byte": lambda lesson: lesson.next_bytes,
    "shared tokens and the rest": lambda lesson: lesson.shared_tokens,
    "chunks": lambda lesson: lesson.chunks,
}


@dataclass
class Trained:
    """A trained student: CPU seconds of its steps, and bits per byte on held-out text at each checkpoint."""

    seconds: float
    bits: list[float]


def train(lesson: Lesson, loss: Loss | None, tokenizer: Tokenizer, held_out: str, steps: int, seed: int) -> Trained:
    """Train a student on the text of a lesson, with a teacher's loss or alone."""
    torch.manual_seed(seed)
    model = decoder(tokenizer.get_vocab_size(), 64, 2)
    options = el.TrainingOptions(steps=steps)
    optimizer = el.RowAdamW(param_groups(model), lr=options.learning_rate, betas=(options.beta1, options.beta2))
    sampler = WindowSampler(np.arange(len(lesson.ids)), max_length=LENGTH, batch_size=options.batch_size, seed=seed)
    seconds, bits = 0.0, []
    for step in range(1, steps + 1):
        started = time.process_time()
        places, targets = sampler.batch(step)
        hidden = model.hidden(lesson.ids[places])
        log_probs = model.head.token_log_probs(hidden, lesson.ids[targets])
        total = -log_probs.mean()
        if loss is not None:
            total = total + loss(model, hidden, log_probs, places)
        total.backward()
        clip_grad_norm_(model.parameters(), options.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate_at(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.process_time() - started
        if step % max(1, steps // CHECKPOINTS) == 0 or step == steps:
            scores = evaluate_text(CausalModel(model, tokenizer), held_out, window=LENGTH)
            bits.append(scores.model.bits_per_byte)
    print(f"{steps} steps: {seconds:.1f} s, {', '.join(f'{each:.3f}' for each in bits)}", flush=True)
    return Trained(seconds, bits)


@dataclass
class Result:
    """Bits per byte of one loss and seed: after all steps, at the best checkpoint, and in the time of plain."""

    last: float
    best: float
    steps: int
    same_time: float


def results(lesson: Lesson, tokenizer: Tokenizer, held_out: str, steps: int, seed: int) -> Iterator[tuple[str, Result]]:
    """Yield each loss with its result, the one without a teacher first."""
    plain = train(lesson, None, tokenizer, held_out, steps, seed)
    yield "none (plain)", Result(plain.bits[-1], min(plain.bits), steps, plain.bits[-1])
    for name, loss in LOSSES.items():
        whole = train(lesson, loss(lesson), tokenizer, held_out, steps, seed)
        fewer = min(steps, max(1, round(steps * (plain.seconds - lesson.seconds) / whole.seconds)))
        short = train(lesson, loss(lesson), tokenizer, held_out, fewer, seed)
        yield name, Result(whole.bits[-1], min(whole.bits), fewer, short.bits[-1])


def spread(values: list[float]) -> str:
    """Return mean and standard deviation over the seeds."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(found: dict[str, list[Result]], steps: int) -> str:
    """Return the results of all seeds as a Markdown table; the first loss is plain's."""
    plain = next(iter(found.values()))
    plain_last, plain_best = [one.last for one in plain], [one.best for one in plain]

    def beside(values: list[float], others: list[float]) -> str:
        return spread([value - other for value, other in zip(values, others, strict=True)])

    rows = []
    for name, each in found.items():
        last, best, same_time = ([getattr(result, field) for result in each] for field in ("last", "best", "same_time"))
        rows.append(
            {
                "teacher's loss": name,
                f"after {steps} steps": spread(last),
                "less plain": "" if each is plain else beside(last, plain_last),
                "best checkpoint": spread(best),
                "last less plain's best": beside(last, plain_best),
                "steps in plain's time": f"{mean(result.steps for result in each):.0f}",
                "after these": spread(same_time),
                "these less plain": "" if each is plain else beside(same_time, plain_last),
                "these less plain's best": beside(same_time, plain_best),
            }
        )
    return markdown_table(rows)


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    data = carried_text().encode() if arguments.text is None else arguments.text.read_bytes()
    size, own = arguments.teacher_bytes, arguments.student_bytes
    if size + arguments.seeds * own + arguments.held_out_bytes > len(data):
        raise SystemExit(f"The text has {len(data):,} bytes, fewer than teacher, students and held-out text need.")
    parts = [data[:size], *(data[size + seed * own :][:own] for seed in range(arguments.seeds))]
    teacher_text, *student_texts, held_out = (
        part.decode(errors="ignore") for part in (*parts, data[-arguments.held_out_bytes :])
    )
    tokenizer = el.train_tokenizer("".join(student_texts), vocab_size=512)
    teacher_tokenizer = el.train_tokenizer(teacher_text, vocab_size=1024)
    torch.manual_seed(0)
    teacher = decoder(teacher_tokenizer.get_vocab_size(), 128, 4)
    corpus = el.TokenCorpus.from_text(teacher_text, teacher_tokenizer)
    options = el.TrainingOptions(steps=arguments.teacher_steps, batch_size=16, max_length=LENGTH, log_every=50)
    for line in el.Trainer(teacher, *corpus.split(0.05), options).run():
        print(line["step"], line["loss"], flush=True)
    teacher.requires_grad_(False).eval()
    teacher_bits = evaluate_text(CausalModel(teacher, teacher_tokenizer), held_out, window=LENGTH).model.bits_per_byte

    found: dict[str, list[Result]] = {}
    half = []  # without a teacher
    for seed, text in enumerate(student_texts):
        lesson, started = Lesson(text, tokenizer, teacher, teacher_tokenizer), time.process_time()
        print(f"seed {seed}: the lesson takes {lesson.seconds:.1f} s", flush=True)
        half += train(lesson, None, tokenizer, held_out, max(1, arguments.steps // 2), seed).bits[-1:]
        for name, result in results(lesson, tokenizer, held_out, arguments.steps, seed):
            found.setdefault(name, []).append(result)
            print(f"{time.process_time() - started:.1f} s, {name}: {result}", flush=True)
    result = table(found, arguments.steps) + (
        f"\nBits per byte of the held-out text, mean ± standard deviation of {len(student_texts)} seeds; differences "
        f"are taken seed by seed. Without a teacher, a schedule of half the steps reaches {spread(half)}. The teacher "
        f"has {teacher_bits:.3f}. Its tokenizer has {lesson.shared.target_size:,} tokens and shares "
        f"{len(lesson.shared.draft_ids)} of the student's {lesson.shared.draft_size}; "
        f"{lesson.alignment.single.double().mean():.0%} of the chunks are one token on each side.\n"
    )
    print(result)
    if arguments.write is not None:
        write_between_markers(arguments.write, "another-tokenizer", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="UTF-8 file; the Python language reference without one")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=450, help="of a student")
    parser.add_argument("--teacher-steps", type=int, default=500)
    parser.add_argument("--teacher-bytes", type=int, default=1_000_000)
    parser.add_argument("--student-bytes", type=int, default=40_000)
    parser.add_argument("--held-out-bytes", type=int, default=60_000)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    main(parser.parse_args())
