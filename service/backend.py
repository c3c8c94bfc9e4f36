"""The parts of one server that the rpc bodies work with.

What lives here: their bundle, built by `server.py`. What must not: rpc bodies, and parts that only the server itself
needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.guide_messages import GuideSource
from service.account import Accounts
from service.admission import Admission
from service.config import ServerConfig
from service.dispatch import Dispatcher
from service.errors import EngineStartingError, UnsupportedOptionError
from service.guide_compiler import GuideCompiler
from service.journal import Journal
from service.request import GenerateRequest, Limits
from service.supervisor import Supervisor
from service.tokenizer import Tokenizer
from service.totals import Totals
from service.workers import Workers


@dataclass(slots=True)
class Backend:
    """The parts that the rpc bodies work with. `tokenizer` and `limits` come with time."""

    config: ServerConfig
    admission: Admission
    journal: Journal
    supervisor: Supervisor
    dispatcher: Dispatcher
    totals: Totals
    accounts: Accounts
    """Of calls of Generate and Complete."""
    guides: GuideCompiler
    prompt_workers: Workers
    """For the prompts of Generate and Complete, so that a long one stalls nobody's tokens."""
    tool_workers: Workers
    """For Tokenize and Detokenize, so that these keep no prompt waiting."""
    tokenizer: Tokenizer | None = None
    limits: Limits | None = None
    """Before an engine was ready: what is known without one."""
    eos_token_ids: tuple[int, ...] = ()
    """Of the tokenizer's, those that the model has."""

    def is_replayed(self, request: GenerateRequest) -> bool:
        """Whether the request's stream goes on after its engine's death."""
        if request.resume_on_engine_death is not None:
            return request.resume_on_engine_death
        return self.config.on_engine_death == "replay"

    async def compile_guide(self, source: GuideSource) -> bytes:
        """What `Submit.guide` takes. Raises what `GuideCompiler.compile` raises, and UnsupportedOptionError."""
        if not self.eos_token_ids:
            raise UnsupportedOptionError(["guided: the model names no end-of-sequence token"])
        return await self.guides.compile(source)

    def served(self) -> tuple[Tokenizer, Limits]:
        """What calls need besides an engine. Raises EngineStartingError."""
        if self.tokenizer is None or self.limits is None:
            raise EngineStartingError(self.supervisor.expected_serving_s())
        return self.tokenizer, self.limits
