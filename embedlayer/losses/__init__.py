"""Losses, statistics and divergences of LM heads, over the whole vocabulary and without a tensor of all logits.

How the loss of a head is computed, in four words:

- **Request**: what a public function is called with becomes, once, the logits that are not computed yet
  (`UncomputedLogits`: hidden states, rows and `LogitSettings`), what is done with them (`LossSettings`), and a
  `Request`: which numbers, of which tokens. `options`, `logit_arguments`, `uncomputed_logits`.
- **Totals**: a few numbers of each token from which its loss follows, such as maximum, log of the sum of exponentials
  and target logit. Those of blocks of rows are merged, and so are those of ranks. `objective`.
- **Objective**: computes totals from a block of logits, and the gradient of the block from that of the totals, in plain
  PyTorch and by kernels. `statistics` for one head and the cross entropy, `divergences` for two heads.
- **Loop**: takes one chunk of tokens after another, and in each one block of rows after another: product, totals,
  gradient, and the products with it. `loop` has it, for stored rows; `blocks` computes the logits of a block and their
  backward, and `token_chunks` the tokens of a chunk. `differentiable_totals` calls the loop from autograd,
  checkpoints blocks of other tables, and has the plain version.

`linear.reduced_and_token_losses` decides which implementation computes a cross entropy: the plain definition
(`definition`), the loop, or its custom operator in compiled graphs (`operators`). `targets` checks targets, and decides
which tokens are computed and whether the host waits for the device.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
