"""From hidden states to logits for rows that a step's forward pass left unprojected: those of scored prompts.

What must live here: the way to run a model's last stretch alone, with all that its family does there (a factor, a
bias). What must not: which rows, and what becomes of their logits.

How it works, for any family: a causal language model of transformers is a decoder and what follows it, and nothing
that follows looks at more than the decoder's output. So that output is kept while the step runs, and later the model
is called again with a decoder that only hands back some of its rows. `startup.py` checks this way against the model's
own logits before anything is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from scheduler.model.families import unsupported

_INSEPARABLE = "its vocabulary projection cannot be told from the rest of it"


class Projection:
    """The stretch from the decoder's output to the logits."""

    def __init__(self, model: Any) -> None:
        """`model`: a causal language model. Raises ModelUnsupportedError if it has not got two parts."""
        self._model = model
        self._decoder = model.get_decoder()
        if self._decoder is None or self._decoder is model:
            raise unsupported(model.config, _INSEPARABLE)
        self._output: Any = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """The hidden states of the forward pass within are kept for `project`, until `drop`."""

        def keep(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
            if getattr(output, "last_hidden_state", None) is None:
                raise unsupported(self._model.config, _INSEPARABLE)
            self._output = output

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits [R, V] of these rows [R] of the kept forward pass."""
        hidden = self._output.last_hidden_state[:, rows]
        output = type(self._output)(last_hidden_state=hidden)
        self._decoder.forward = lambda *_args, **_kwargs: output  # an attribute of the object goes before the class's
        try:
            logits = self._model(input_ids=rows[None], logits_to_keep=0, use_cache=False).logits
        finally:
            del self._decoder.forward
        return logits[0].float()

    def drop(self) -> None:
        """Lets go of what was kept."""
        self._output = None
