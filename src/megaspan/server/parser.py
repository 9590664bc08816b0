"""A GLM reply, token by token, as reasoning, text and tool calls.

    reasoning</think>
    text
    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

The result does not depend on how many tokens come at once: `complete_message` of the events is the same.
A call is complete with its end marker alone. What was cut off before, by whatever, never looks complete: its
arguments stay the beginning of a JSON object, so that no client runs half a command.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megaspan.server.markers import CALLING, THINKING, Marker, MarkerStream
from megaspan.server.reply_pieces import Piece
from megaspan.server.tool_arguments import ToolArguments
from megaspan.tokenizer import Tokenizer

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    index: int  # 0 for a reply's first call
    id: str
    name: str


@dataclass(frozen=True)
class ToolArgumentsDelta:
    index: int
    json_fragment: str  # a complete call's fragments, joined, are one JSON object


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is complete. For one that was cut off it never comes."""

    index: int


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object; the beginning of one where the call was cut off


@dataclass(frozen=True)
class Message:
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def complete_message(events: Iterable[Event]) -> Message:
    """The whole reply, for clients that do not stream."""
    reasoning, content, calls = [], [], []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case TextDelta(text):
                content.append(text)
            case ToolCallStart(_, call_id, name):
                calls.append((call_id, name, []))
            case ToolArgumentsDelta(index, fragment):
                calls[index][2].append(fragment)
    tool_calls = tuple(ToolCall(call_id, name, "".join(parts)) for call_id, name, parts in calls)
    return Message("".join(reasoning), "".join(content), tool_calls)


class Place(Enum):
    """Where in the reply the parser is."""

    REASONING = "reasoning"
    CONTENT = "content"
    NAME = "a call's name"
    CALL = "between a call's arguments"
    KEY = "an argument's key"
    VALUE = "an argument's value"


class ReplyParser:
    """Feed it the pieces of one reply with `push`, then call `finish`.

    tools: those that the reply may call, in OpenAI's form. Without any, tool markers mean nothing.
    thinking: the prompt ended inside `<think>`.
    separate_reasoning: False leaves the reasoning in the text, between `<think>` and `</think>`.
    continued: the reply goes on with a text that the prompt began, so line ends at its start belong to it.

    A call in the middle of the reasoning ends the reasoning, as in SGLang: the marker is one special token,
    which no prose spells, and an agent would wait for ever on a call that stays a thought. Blanks between
    the parts are the chat layout's: line ends before reasoning and text, and blanks before `</think>` and
    around calls, are left out, as the template leaves them out of the next prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[dict[str, Any]] = (),
        thinking: bool = False,
        separate_reasoning: bool = True,
        continued: bool = False,
    ) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._markers = MarkerStream(tokenizer, THINKING + (CALLING if tools else ()))
        self._separate = separate_reasoning
        self._content = Trimmed(begun=continued)
        self._place = Place.CONTENT
        self._events: list[Event] = []
        self._begun_calls = self._complete_calls = 0
        self.reasoning_tokens = 0  # without the markers around them
        if thinking:
            self._open_reasoning()

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them complete."""
        return 0 < self._begun_calls == self._complete_calls

    def push(self, pieces: Iterable[Piece]) -> list[Event]:
        for piece in pieces:
            reasoning = self._place is Place.REASONING
            for part in self._markers.push(piece):
                self._take(part)
            if reasoning and self._place is Place.REASONING:
                self.reasoning_tokens += piece.tokens
        return self._take_events()

    def finish(self) -> list[Event]:
        """What was held back. A call that was cut off stays so; one cut off in its name was never made."""
        for part in self._markers.finish():
            self._take(part)
        self._close_reasoning(marker="")
        if not self._begun_calls:
            self._emit(TextDelta(self._content.finish()))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, part: str | Marker) -> None:
        if isinstance(part, str):
            self._take_text(part)
        elif part is Marker.CALL:
            self._close_reasoning()
            self._place, self._name = Place.NAME, ""
        elif self._place in (Place.REASONING, Place.CONTENT):
            self._take_thinking(part)
        else:
            self._take_calling(part)

    def _take_text(self, text: str) -> None:
        match self._place:
            case Place.REASONING:
                self._emit(self._reasoning_delta(self._reasoning.push(text)))
            case Place.CONTENT:
                self._emit(TextDelta(self._content.push(text)))
            case Place.NAME:
                self._name += text
            case Place.KEY:
                self._key += text
            case Place.VALUE:
                self._emit_arguments(self._arguments.push(text))

    def _take_thinking(self, marker: Marker) -> None:
        if marker is Marker.THINK and self._place is Place.CONTENT:
            self._open_reasoning()
        elif marker is Marker.END_THINK:
            self._close_reasoning()

    def _take_calling(self, marker: Marker) -> None:
        match marker:
            case Marker.END_CALL:
                self._close_call()
            case Marker.KEY:
                self._start_call()
                if self._place is not Place.CONTENT:
                    self._emit_arguments(self._arguments.close())
                    self._place, self._key = Place.KEY, ""
            case Marker.VALUE if self._place is Place.KEY:
                self._emit_arguments(self._arguments.open(self._key.strip()))
                self._place = Place.VALUE
            case Marker.END_VALUE if self._place is Place.VALUE:
                self._emit_arguments(self._arguments.close())
                self._place = Place.CALL

    def _open_reasoning(self) -> None:
        self._place, self._reasoning = Place.REASONING, Trimmed()
        if not self._separate:
            self._content.begun = True
            self._emit(TextDelta(Marker.THINK.value))

    def _close_reasoning(self, marker: str = Marker.END_THINK.value) -> None:
        if self._place is Place.REASONING:
            self._place = Place.CONTENT
            if not self._separate:
                self._emit(TextDelta(marker))

    def _start_call(self) -> None:
        """Report the call once its name is complete, which only the next marker tells."""
        if self._place is not Place.NAME:
            return
        name = self._name.strip()
        if not name:  # no client could answer it
            self._place = Place.CONTENT
            return
        self._arguments = ToolArguments(self._schemas.get(name, {}))
        self._emit(ToolCallStart(self._begun_calls, f"call_{secrets.token_hex(12)}", name))
        self._begun_calls += 1
        self._emit_arguments(ToolArguments.BEGINNING)
        self._place = Place.CALL

    def _close_call(self) -> None:
        self._start_call()
        if self._place in (Place.CALL, Place.KEY, Place.VALUE):
            self._emit_arguments(self._arguments.finish())
            self._emit(ToolCallEnd(self._begun_calls - 1))
            self._complete_calls += 1
            self._place = Place.CONTENT

    def _reasoning_delta(self, text: str) -> Event:
        return ReasoningDelta(text) if self._separate else TextDelta(text)

    def _emit_arguments(self, fragment: str) -> None:
        self._emit(ToolArgumentsDelta(self._begun_calls - 1, fragment))

    def _emit(self, event: Event) -> None:
        """Add an event, or its text to the last one's, so that a burst of tokens makes few events."""
        last = self._events[-1] if self._events else None
        match event:
            case ReasoningDelta("") | TextDelta("") | ToolArgumentsDelta(_, ""):
                pass
            case ReasoningDelta(text) | TextDelta(text) if isinstance(last, type(event)):
                self._events[-1] = replace(last, text=last.text + text)
            case ToolArgumentsDelta(index, more) if (
                isinstance(last, ToolArgumentsDelta) and last.index == index
            ):
                self._events[-1] = replace(last, json_fragment=last.json_fragment + more)
            case _:
                self._events.append(event)


class Trimmed:
    """Text without line ends at its start, and with blanks held back until something follows them."""

    def __init__(self, begun: bool = False) -> None:
        self.begun = begun
        self._blanks: list[str] = []

    def push(self, text: str) -> str:
        if not self.begun:
            text = text.lstrip("\r\n")
            self.begun = bool(text)
        kept = text.rstrip(BLANKS)
        shown = "".join(self._blanks) + kept if kept else ""
        if kept:
            self._blanks.clear()
        self._blanks.append(text[len(kept) :])
        return shown

    def finish(self) -> str:
        blanks, self._blanks = "".join(self._blanks), []
        return blanks
