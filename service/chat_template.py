"""A conversation to text, with the model's own Jinja template, such that users' text cannot pose as the template's.

The template is free to trim, quote or test what it is given, so the contents must look to it as they are. Only where a
content holds the string of a special token is one character changed: the first of that string becomes a stand-in
from a private-use area that occurs nowhere else in the conversation. What the rendered text then holds of special
tokens is the template's own; `Rendered.literal` puts the changed characters back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from scheduler.errors import ConfigurationError
from service.errors import TemplateError
from service.request import ChatTurn

_PRIVATE_USE_AREA = range(0xE000, 0xF900)
"""Of the basic plane, so that JSON escapes a stand-in as one unit; 6,400 characters."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation."""

    text: str
    """With stand-ins."""
    stand_ins: Mapping[str, str]
    """Stand-in → the character it stands for; empty if no content holds the string of a special token."""

    def literal(self, text: str) -> str:
        """A part of the text with the stand-ins replaced, also where the template escaped them as JSON does."""
        for stand_in, char in self.stand_ins.items():
            text = text.replace(stand_in, char)
            text = re.sub(rf"\\u(?i:{ord(stand_in):04x})", char.replace("\\", r"\\"), text)
        return text


class ChatTemplate:
    """One model's template. Thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, str], special_tokens: Collection[str]) -> None:
        """`variables`: such as `bos_token`. Raises ConfigurationError if the source is no template."""
        self._source = source
        self._variables: dict[str, Any] = dict(variables)
        self._taken = _private_use(" ".join((source, *variables.values(), *special_tokens)))
        alternatives = "|".join(re.escape(token) for token in special_tokens)
        self._first_char_of_special = re.compile(f"(?={alternatives}).", re.DOTALL) if alternatives else None
        try:
            self._render([ChatTurn("user", "")], add_generation_prompt=False)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigurationError(f"the model's chat template does not parse: line {error.lineno}") from None
        except Exception:  # noqa: BLE001, S110 - it parses; whether it takes a given conversation is another question
            pass

    def render(self, turns: Sequence[ChatTurn], *, add_generation_prompt: bool) -> Rendered:
        """Raises TemplateError, without a word of the template's: it may quote the conversation."""
        stand_ins = self._choose_stand_ins(turns)
        guarded = [
            turn if turn.parse_special else ChatTurn(turn.role, self._guard(turn.content, stand_ins)) for turn in turns
        ]
        try:
            text = self._render(guarded, add_generation_prompt=add_generation_prompt)
        except Exception:  # noqa: BLE001 - a template is the model's program: it may raise anything
            raise TemplateError from None
        return Rendered(text, {stand_in: char for char, stand_in in stand_ins.items()})

    def _render(self, turns: Sequence[ChatTurn], *, add_generation_prompt: bool) -> str:
        texts_and_spans: Any = chat_template_utils.render_jinja_template(
            conversations=[[{"role": turn.role, "content": turn.content} for turn in turns]],
            chat_template=self._source,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )
        return str(texts_and_spans[0][0])

    def _choose_stand_ins(self, turns: Sequence[ChatTurn]) -> dict[str, str]:
        """Character → stand-in for each first character of a special token's string in a content."""
        if self._first_char_of_special is None:
            return {}
        firsts: set[str] = set()
        for turn in turns:
            if not turn.parse_special:
                firsts.update(self._first_char_of_special.findall(turn.content))
        if not firsts:
            return {}
        taken = self._taken.union(*(_private_use(turn.content) for turn in turns))
        free = (chr(code) for code in _PRIVATE_USE_AREA if code not in taken)
        stand_ins = dict(zip(sorted(firsts), free, strict=False))
        if len(stand_ins) < len(firsts):  # a text that holds all 6,400 of them is made for the purpose
            raise TemplateError
        return stand_ins

    def _guard(self, content: str, stand_ins: Mapping[str, str]) -> str:
        if not stand_ins or self._first_char_of_special is None:
            return content
        return self._first_char_of_special.sub(lambda match: stand_ins[match[0]], content)


def _private_use(text: str) -> set[int]:
    """The private-use characters in a text, and those in it as JSON escapes."""
    escaped = {int(code, 16) for code in re.findall(r"\\u([0-9a-fA-F]{4})", text)}
    return escaped | {ord(char) for char in set(text) if ord(char) in _PRIVATE_USE_AREA}
