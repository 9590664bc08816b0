"""Text to token ids and back: byte-level BPE; special tokens come from the program, never from text."""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megaspan.errors import UserError
from megaspan.token_budget import SAMPLES, TokenBudget, pieces

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PRIVATE_USE = range(0xE000, 0xF900)


class Tokenizer:
    """Read from a folder in Hugging Face's layout: `tokenizer.json` and perhaps `chat_template.jinja`."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: str | None = None) -> None:
        backend.encode_special_tokens = True
        backend.no_truncation()  # what a training script left in the file must not cut or fill a prompt
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.files: dict[str, bytes] = {"tokenizer.json": backend.to_str(pretty=True).encode()}
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in sorted(added.items())}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Raises UserError when the folder has no readable `tokenizer.json`."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"{folder} has no tokenizer.json; name a folder that holds a model or a tokenizer"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(_all_special(path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises bare Exception for any broken file
            raise UserError(f"{path} is not a readable tokenizer: {error}") from error
        paths = [Path(folder) / name for name in FILES]
        files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        template = files.get("chat_template.jinja")
        tokenizer = cls(backend, template.decode() if template is not None else None)
        tokenizer.files = files
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Write the files that the tokenizer was loaded from, unchanged."""
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def special(self, token: str) -> int:
        """The id of a special token; KeyError for any other text."""
        return self.special_tokens[token]

    def encode(self, text: str, budget: TokenBudget | None = None) -> list[int]:
        """Ids of the text alone. Text that spells a special token is encoded as the characters it is.

        With a budget ContextTooLong comes as soon as it is clear that it does not suffice.
        """
        if budget is None:
            return self.encode_batch([text])[0]  # the library's single call would not let other threads run
        self._check_size(text, budget)
        ids: list[int] = []
        for piece in pieces(text) if self._keeps_breaks else [text]:
            more = self.encode_batch([piece])[0]
            budget.spend(len(more))
            ids += more
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores. UserError for millions of blanks in a row, say."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # it derives from BaseException, and has no module
                raise
            raise UserError("the tokenizer gave up on the text: break up its longest run of blanks") from None
        return [encoding.ids for encoding in encodings]

    def _check_size(self, text: str, budget: TokenBudget) -> None:
        if self.backend.normalizer is None:  # which could make the text shorter
            budget.check_size(len(text.encode()), self.longest_token_bytes)

    @cached_property
    def _keeps_breaks(self) -> bool:
        """Whether a text may be cut at BREAK; not, say, where a space is put before each text."""
        return all(
            self.encode(left + right) == self.encode(left) + self.encode(right) for left, right in SAMPLES
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes[int(number)] for number in ids).decode("utf-8", errors="replace")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each id adds to a text, as bytes."""
        alphabet = byte_alphabet()
        contents = [b""] * self.vocab_size
        for token, number in self.backend.get_vocab(with_added_tokens=True).items():
            special = token in self.special_tokens
            contents[number] = (
                token.encode() if special else bytes(alphabet[character] for character in token)
            )
        return contents

    @cached_property
    def longest_token_bytes(self) -> int:
        return max(map(len, self.token_bytes))

    def stream(self) -> "TextStream":
        """A decoder for ids that come one at a time."""
        return TextStream(self)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        budget: TokenBudget | None = None,
        **arguments: Any,
    ) -> list[int]:
        """Ids of a conversation in OpenAI's message format; `arguments` go to the template.

        Special tokens written in the template become their ids. Those that a message or a tool spells do
        not: a guard goes behind each character that could start one, and comes out just before encoding.
        budget: as `encode` takes it.
        """
        if self.chat_template is None:
            raise UserError("this tokenizer has no chat_template.jinja, so it cannot encode messages")
        messages = [parse_arguments(message) for message in messages]
        guard = unused_character(json.dumps([messages, tools, arguments], ensure_ascii=False, default=str))
        starts = {token[0] for token in self.special_tokens}
        protect = {start: start + guard for start in starts}
        try:
            text = self._compiled_template.render(
                messages=protect_strings(messages, protect),
                tools=protect_strings(tools, protect) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **{name: protect_strings(value, protect) for name, value in arguments.items()},
            )
        except TemplateError as error:
            raise UserError(f"the chat template refused the messages: {error}") from error
        return self._encode_rendered(text, guard, budget)

    @cached_property
    def _compiled_template(self) -> Template:
        return chat_environment().from_string(self.chat_template or "")

    def _encode_rendered(self, text: str, guard: str, budget: TokenBudget | None = None) -> list[int]:
        if budget is not None:
            self._check_size(text.replace(guard, ""), budget)
        ids: list[int] = []
        for part in re.split(self._written_tokens(guard), text):
            if part not in self.special_tokens:
                ids += self.encode(part.replace(guard, ""), budget)
                continue
            ids.append(self.special_tokens[part])
            if budget is not None:
                budget.spend(1)
        return ids

    def _written_tokens(self, guard: str) -> str:
        """A pattern for the special tokens that the template wrote, the longest first.

        It passes over a guarded beginning at once: a text of nothing else must not hold other threads up.
        """
        endings: dict[str, list[str]] = {}
        for token in sorted(self.special_tokens, key=len, reverse=True):
            endings.setdefault(token[0], []).append(re.escape(token[1:]))
        tokens = [f"{re.escape(start)}(?!{guard})(?:{'|'.join(ends)})" for start, ends in endings.items()]
        return f"({'|'.join(tokens)})"


def _all_special(tokenizer_json: str) -> str:
    """The same tokenizer with every added token special: `encode_special_tokens` protects only those."""
    content = json.loads(tokenizer_json)
    for token in content.get("added_tokens") or []:
        token["special"] = True
    return json.dumps(content)


class TextStream:
    """Turns ids into text as they come: `push` returns what is complete so far, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, skip: int = 0) -> str:
        """The text that a token completes, without the token's first `skip` bytes."""
        return self._decoder.decode(self._token_bytes[int(token_id)][skip:])

    def finish(self) -> str:
        """The rest: U+FFFD when the ids ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (as in GPT-2).

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: blocks leave no white space, `tojson` escapes nothing for HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def unused_character(text: str) -> str:
    for code in PRIVATE_USE:
        if chr(code) not in text:
            return chr(code)
    raise UserError("the messages use every private-use character; leave at least one out")


def protect_strings(value: Any, protect: dict[str, str]) -> Any:
    """A copy of nested lists and dictionaries with every string's characters, keys' too, guarded."""
    if isinstance(value, str):
        for character, guarded in protect.items():  # `str.translate` would hold other threads up
            value = value.replace(character, guarded)
        return value
    if isinstance(value, dict):
        return {protect_strings(key, protect): protect_strings(item, protect) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [protect_strings(item, protect) for item in value]
    return value


def parse_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its tool calls' arguments as dictionaries, where clients send them as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise UserError(
                    f"the arguments of a call of {function.get('name')} are not JSON: {error}"
                ) from error
        calls.append({"function": {"name": function.get("name"), "arguments": arguments or {}}})
    return {**message, "tool_calls": calls}
