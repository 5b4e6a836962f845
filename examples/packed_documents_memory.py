"""Memory of a training step on packed documents: attention in blocks of queries, and with all scores at once.

    python examples/packed_documents_memory.py --tokens 16384

Prints the memory that the loss of a decoder with one block (width 128, 4 heads) and its gradients add, on the CPU. Each
number is measured in a process of its own.
"""

import argparse
import multiprocessing
import resource

import torch
from torch.utils.checkpoint import checkpoint

import embedlayer as el
from embedlayer.core import block_sizes

POSITIONS = {"rotary": lambda: "rotary", "ALiBi": lambda: el.AlibiBias(4)}


def added_mib(tokens: int, position: str, at_once: bool) -> float:
    """Return how much the resident memory of this process grows in a training step, in MiB."""
    if at_once:
        block_sizes.ATTENTION_SCORES["cpu"] = 4 * tokens * tokens
    model = el.DecoderLM(el.TokenEmbedding(256, 128), POSITIONS[position](), num_layers=1, num_heads=4)
    ids, documents = torch.randint(256, (1, tokens)), 1 + torch.arange(tokens)[None] // 1000
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)  # imports 150 MiB of torch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.loss(ids, ids, attention_mask=documents).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    tokens = parser.parse_args().tokens
    for position in POSITIONS:
        for at_once in (False, True):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                mib = pool.apply(added_mib, (tokens, position, at_once))
            print(f"{position}, {'all scores at once' if at_once else 'blocks of queries'}: {mib:,.0f} MiB")
