"""Transfer engines: how bytes get between a slab and an engine's paged KV cache (``base.py`` says what each must do)."""
