"""Files on disk: atomic writes, checked JSON, safetensors, locks."""
