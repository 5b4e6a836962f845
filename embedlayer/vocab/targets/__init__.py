"""What an edit is applied to, one function each: a live module, a checkpoint folder, a run, a GGUF file."""
