"""What the harness and the GPU tests change in vLLM before an engine is made here or in a process forked from here."""

from __future__ import annotations

from typing import Any


def seed_weights(std: float = 0.02) -> None:
    """After vLLM's dummy load, refill the weights: N(0, std) matrices, unit norms, zero biases.

    vLLM's own dummy weights are so small that answers do not depend on the KV cache. 0.02 suits a hidden size of 4096; what an
    answer owes to its context shrinks with ``std × sqrt(hidden size)``.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    original = dummy_loader.DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        original(self, model, model_config)
        with torch.no_grad():
            for i, (name, weight) in enumerate(model.named_parameters()):
                if weight.ndim < 2:
                    weight.fill_(1.0 if "norm" in name else 0.0)
                else:
                    generator = torch.Generator(device=weight.device).manual_seed(1234 + i)
                    weight.normal_(0.0, std, generator=generator)

    dummy_loader.DummyModelLoader.load_weights = load_weights


def skip_inductor_init() -> None:
    """vLLM readies torch's inductor for compilations while it serves, of which there are none here: seconds of every start."""
    from vllm.compilation import compiler_interface

    if hasattr(compiler_interface, "trigger_inductor_lazy_init"):
        compiler_interface.trigger_inductor_lazy_init = lambda device=None: None
