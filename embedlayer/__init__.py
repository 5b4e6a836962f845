"""embedlayer: the embedding layer of a language model, from token IDs to vectors and from hidden states to loss.

`import embedlayer as el` gives the names that most programs need. Every public name can be imported from the package
that defines it, such as `embedlayer.positions` or `embedlayer.vocab`, and is loaded when it is first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
