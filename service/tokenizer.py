"""Text to token ids and back, as the served model sees them.

What lives here: encoding and whole decoding. What must not: torch (`AutoTokenizer` would bring it), gRPC. All methods
of `Tokenizer` may be called from any thread; `encode` of a long text takes milliseconds to seconds and belongs off the
loop. So the library is called by its batches alone, even for one text: they let go of the interpreter, `encode` and
`decode` of one text do not, and would stop the loop from any thread.

Control tokens are those that the model's files flag as special. Two instances of the tokenizer exist, because whether
special strings are recognised is a state of one: `_ordinary` recognises them, `_plain` does not. In a conversation
whose contents hold such strings both are needed at once. There each special token of the template's own is first
replaced by its alias: a string that nobody can guess, and that `_plain` splits at just as `_ordinary` splits at the
token itself. So the text around it is tokenized as ever, with no boundary where the template has none.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

from scheduler.errors import EmberlineError, StartupError
from service.chat_template import ChatTemplate, Rendered
from service.detokenizer import Detokenizer, Stage, compile_decoder
from service.errors import NoChatTemplateError
from service.model_files import ModelFiles, read_model_files
from service.request import ChatInput, ChatTurn, PromptInput, TextInput, TokenInput
from service.text_bound import bytes_per_token_max


class Tokenizer:
    """One model's tokenizer, chat template and generation defaults."""

    def __init__(self, tokenizer_json: str, files: ModelFiles) -> None:
        """Raises StartupError for a JSON that is no tokenizer, and ConfigurationError."""
        self._ordinary = _instance(tokenizer_json, files.special_tokens)
        self._plain = _instance(tokenizer_json, files.special_tokens)
        self._plain.encode_special_tokens = True
        special = {
            token_id: token for token_id, token in self._ordinary.get_added_tokens_decoder().items() if token.special
        }
        self._aliases = {token.content: _alias() for token in special.values()}
        self._plain.add_tokens([_alias_token(token, self._aliases[token.content]) for token in special.values()])
        self._id_of_alias_id = {
            self._plain.token_to_id(self._aliases[token.content]): token_id for token_id, token in special.items()
        }
        # Longest first, as the tokenizer itself matches.
        alternatives = "|".join(re.escape(content) for content in sorted(self._aliases, key=len, reverse=True))
        self._special_pattern = re.compile(alternatives or "(?!)")
        self._chat_template: ChatTemplate | None = None
        if files.chat_template is not None:
            self._chat_template = ChatTemplate(files.chat_template, files.named_tokens, self._aliases)
        description = json.loads(tokenizer_json)
        self._new_stages: Callable[[], list[Stage]] = compile_decoder(description.get("decoder"))
        self.bytes_per_token_max = bytes_per_token_max(description)
        """Bytes of text that one token can stand for; None: no bound is known."""
        self._token_strings = _token_strings(self._ordinary)
        self._unspecial_strings = [
            None if token_id in special else string for token_id, string in enumerate(self._token_strings)
        ]
        self.eos_token_ids = files.eos_token_ids or self._named_eos(files)
        self.sampling_defaults = files.sampling_defaults
        self.vocab_size = len(self._token_strings)
        """One more than the highest id that has a text; the model's own vocab_size may be larger."""
        self._anchor = tuple(token_id for token_id, string in enumerate(self._token_strings) if string)[:1]
        """A token to stand before a piece, so that it keeps the space that decoders cut from the first one."""
        self._pieces: dict[int, str] = {}

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, prompt: PromptInput) -> tuple[int, ...]:
        """Any validated input; token ids pass as they are. Raises what `encode_chat` does."""
        match prompt:
            case TokenInput(token_ids):
                return token_ids
            case TextInput(text, add_special_tokens, parse_special):
                return self.encode_text(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
            case ChatInput(turns, add_generation_prompt):
                return self.encode_chat(turns, add_generation_prompt=add_generation_prompt)

    def encode_text(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> tuple[int, ...]:
        """Special-token strings in the text stay plain text unless `parse_special`."""
        instance = self._ordinary if parse_special else self._plain
        return _ids(instance, text, add_special_tokens=add_special_tokens)

    def encode_chat(self, turns: Sequence[ChatTurn], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Raises NoChatTemplateError and TemplateError."""
        if self._chat_template is None:
            raise NoChatTemplateError
        rendered = self._chat_template.render(turns, add_generation_prompt=add_generation_prompt)
        if not rendered.stand_ins:
            return _ids(self._ordinary, rendered.text)
        return self._encode_mixed(rendered)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a text count as empty."""
        return str(self._ordinary.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text in the middle of a text, special tokens included."""
        for token_id in set(token_ids) - self._pieces.keys():
            self._pieces[token_id] = self._piece(token_id)
        return [self._pieces[token_id] for token_id in token_ids]

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """For the text of one sequence, a token at a time."""
        return Detokenizer(self._new_stages(), self._unspecial_strings if skip_special_tokens else self._token_strings)

    def _encode_mixed(self, rendered: Rendered) -> tuple[int, ...]:
        """Of a text in which the special tokens' strings are control tokens, and those with stand-ins are not."""
        parts: list[str] = []
        position = 0
        for match in self._special_pattern.finditer(rendered.text):
            parts += (rendered.literal(rendered.text[position : match.start()]), self._aliases[match[0]])
            position = match.end()
        parts.append(rendered.literal(rendered.text[position:]))
        ids = _ids(self._plain, "".join(parts))
        return tuple(self._id_of_alias_id.get(token_id, token_id) for token_id in ids)

    def _piece(self, token_id: int) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=False)
        detokenizer.prime(self._anchor)
        return detokenizer.push(token_id) + detokenizer.flush()

    def _named_eos(self, files: ModelFiles) -> tuple[int, ...]:
        token_id = self._ordinary.token_to_id(files.named_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)


def load_tokenizer(model: str | Path, revision: str | None = None) -> Tokenizer:
    """`model`: a directory, or a hub name. Blocking: call it off the loop. Raises StartupError (files missing, not
    readable) and ConfigurationError (a config that cannot be served).
    """
    try:
        files = read_model_files(model, revision)
        return Tokenizer(files.tokenizer_file.read_text(encoding="utf-8"), files)
    except EmberlineError:
        raise
    except Exception as error:  # noqa: BLE001 - files that say something else than they should can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise StartupError(f"the tokenizer files of {model} cannot be used: {reason[:500]}") from None


def _instance(tokenizer_json: str, special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    try:
        instance = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises bare Exception
        raise StartupError(f"cannot read tokenizer.json: {error}") from None
    instance.no_truncation()
    instance.no_padding()
    flagged = {token.content for token in instance.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in special_tokens if text not in flagged and instance.token_to_id(text) is not None]
    instance.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in missing])
    return instance


def _ids(instance: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
    """`fast` leaves out the offsets, which nobody asks for."""
    return tuple(instance.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _alias() -> str:
    return f"\ue000{secrets.token_hex(16)}\ue001"


def _alias_token(token: tokenizers.AddedToken, alias: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        alias, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
    )


def _token_strings(instance: tokenizers.Tokenizer) -> list[str | None]:
    vocabulary = instance.get_vocab(with_added_tokens=True)
    strings: list[str | None] = [None] * (1 + max(vocabulary.values(), default=-1))
    for string, token_id in vocabulary.items():
        strings[token_id] = string
    return strings
