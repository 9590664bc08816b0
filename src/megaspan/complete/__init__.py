"""The main job: complete a file with the rest of its repository in the context."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

import megaspan
from megaspan.complete.healing import Healing, split_blank_end
from megaspan.complete.memory import check_memory, fitting_context, kind_of
from megaspan.complete.report import Completion
from megaspan.config import ModelConfig
from megaspan.costs.memory import Format
from megaspan.engine.generation import CHUNKS, Generation, sample
from megaspan.errors import UserError
from megaspan.model.folder import resolve_device, resolve_dtype
from megaspan.repository import (
    Prompt,
    decode,
    order_by_distance,
    pack,
    read_repository,
    read_target,
    read_text,
)
from megaspan.tokenizer import Tokenizer

DEFAULT_CONTEXT = 32768
MOST_THREADS = 1024
REPOSITORY, END_OF_FILE = "<|repository|>", "<|file|>"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to complete, and how. Either `repo` and `file`, or `prompt_file` ("-" is standard input).

    index_dtype: of the index keys, "auto" for the model's: bfloat16 keys halve what a float32 model scans.
    device: "auto" is a GPU where there is one.
    context: most prompt tokens; default 32768 or what fits in memory for a repository, all of a prompt file.
    """

    model: Path
    repo: Path | None = None
    file: str | None = None
    line: int | None = None
    prompt_file: str | None = None
    context: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "auto"
    index_dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_file is None and (self.repo is None or self.file is None):
            raise UserError("nothing to complete: give --repo and --file, or --prompt-file")
        if self.prompt_file is not None and (self.repo, self.file, self.line) != (None, None, None):
            raise UserError("--prompt-file is a prompt of its own: leave out --repo, --file and --line")
        for name in ("context", "max_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise UserError(
                f"--threads is {self.threads}: give at most {MOST_THREADS}, and best as many as cores"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature is {self.temperature}: it must be a number of 0 or more")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed is {self.seed}: it must be 0 or more, and below 2^63")


def complete(
    request: Request, console: Console, write: Callable[[str], None] = lambda text: None
) -> Completion:
    """Do the job: check, pack, load, read with a progress bar on `console`, stream the text to `write`.

    Ctrl-C while reading or generating ends it early, with what there is. Raises UserError for bad input,
    before the work starts.
    """
    request = replace(request, device=resolve_device(request.device))
    if not request.model.is_dir():
        raise UserError(f"no model at {request.model}: give --model a folder with config.json and weights")
    config = ModelConfig.from_json(request.model)
    dtype = _dtype(request, config)
    tokenizer = _tokenizer(request, config)
    skipped: Counter[str] = Counter()
    prompt, blank_end = _prompt(request, config, dtype, tokenizer, skipped)
    completion = Completion(
        config=config,
        prompt_tokens=len(prompt.token_ids),
        files_included=prompt.files_included,
        files_left_out=prompt.files_left_out,
        truncated=prompt.truncated,
        skipped=dict(skipped),
        settings=_settings(request, dtype),
    )
    generation = open_generation(request, dtype, len(prompt.token_ids) + request.max_tokens)
    try:
        logits = _read(generation, prompt.token_ids, completion, console)
        if console.is_terminal:
            console.print(_ending(tokenizer, prompt), style="dim", markup=False, highlight=False, end="")
        healing = Healing(blank_end, tokenizer.token_bytes)
        _generate(generation, logits, request, tokenizer, healing, completion, write)
    except KeyboardInterrupt:
        completion.stopped_by = "interrupt"
    memory = generation.cache.memory()
    completion.latent_bytes, completion.index_bytes = memory["latent"], memory["index"]
    return completion


def open_generation(request: Request, dtype: str, capacity: int) -> Any:
    """Load the model, and give it a cache for `capacity` tokens."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    model = megaspan.load(request.model, dtype=dtype, device=request.device)
    index_dtype = getattr(torch, dtype if request.index_dtype == "auto" else request.index_dtype)
    return Generation(model, capacity, index_dtype=index_dtype)


def _dtype(request: Request, config: ModelConfig) -> Format:
    return cast(Format, str(resolve_dtype(request.dtype, config, request.device)).removeprefix("torch."))


def _tokenizer(request: Request, config: ModelConfig) -> Tokenizer:
    tokenizer = Tokenizer.load(request.model)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{request.model} has a tokenizer of {tokenizer.vocab_size:,} tokens for a model of "
            f"{config.vocab_size:,}: they do not belong together"
        )
    if request.prompt_file is None and not {REPOSITORY, END_OF_FILE} <= tokenizer.special_tokens.keys():
        raise UserError(
            f"{request.model} has no {REPOSITORY} and {END_OF_FILE} tokens, so it reads no repositories: "
            f"use --prompt-file"
        )
    return tokenizer


def _settings(request: Request, dtype: str) -> dict[str, Any]:
    names = ("repo", "file", "line", "prompt_file", "max_tokens", "temperature", "seed", "device", "threads")
    settings = {name: getattr(request, name) for name in names}
    paths = {"model": str(request.model), "repo": request.repo and str(request.repo)}
    return {**settings, **paths, "dtype": dtype}


# --- the prompt ------------------------------------------------------------------------------------------


def _prompt(
    request: Request, config: ModelConfig, dtype: Format, tokenizer: Tokenizer, skipped: Counter[str]
) -> tuple[Prompt, bytes]:
    """The prompt as token ids, and the white space taken off its end, after every check before the work."""
    if request.prompt_file is not None:
        text, blank_end = split_blank_end(_prompt_text(request.prompt_file))
        token_ids = tokenizer.encode(text)
        _check_length(len(token_ids), request, config)
        check_memory(config, dtype, len(token_ids), *_room(request))
        return Prompt(token_ids, (), (), None), blank_end
    assert request.repo is not None
    assert request.file is not None
    context = _context(request, config, dtype)
    files = read_repository(request.repo, lambda path, reason: skipped.update([reason]))
    if not files:
        raise UserError(f"{request.repo} holds no text files: give a repository with some")
    target = read_target(request.repo, request.file, request.line)
    name = request.repo.resolve().name
    text, blank_end = split_blank_end(target.text)
    return pack(tokenizer, order_by_distance(files, target), target.path, text, context, name), blank_end


def _prompt_text(prompt_file: str) -> str:
    if prompt_file != "-":
        text = read_text(Path(prompt_file))
    else:
        if sys.stdin is None:
            raise UserError("standard input is closed: give the prompt with --prompt-file FILE")
        try:
            text = decode(sys.stdin.buffer.read())
        except UnicodeError:
            raise UserError("standard input is not UTF-8 text") from None
    if not text:
        raise UserError("the prompt is empty: give some text to go on from")
    return text


def _check_length(tokens: int, request: Request, config: ModelConfig) -> None:
    most = config.max_position_embeddings - request.max_tokens
    if tokens > most:
        raise UserError(
            f"the prompt of {tokens:,} tokens and {request.max_tokens:,} new ones are more than the model's "
            f"{config.max_position_embeddings:,} positions: shorten the prompt or lower --max-tokens"
        )
    if request.context is not None and tokens > request.context:
        raise UserError(f"the prompt has {tokens:,} tokens, more than --context {request.context}")


def _context(request: Request, config: ModelConfig, dtype: Format) -> int:
    """Most prompt tokens: as asked if they fit, else the default or the largest context that fits."""
    most = config.max_position_embeddings - request.max_tokens
    if most < 1 or (request.context or 0) > most:
        raise UserError(
            f"--context {request.context or DEFAULT_CONTEXT} and --max-tokens {request.max_tokens} are more "
            f"than the model's {config.max_position_embeddings:,} positions: lower one of them"
        )
    if request.context is None:
        return fitting_context(config, dtype, min(DEFAULT_CONTEXT, most), *_room(request))
    check_memory(config, dtype, request.context, *_room(request))
    return request.context


def _room(request: Request) -> tuple[int, int, str]:
    """What the need of memory depends on beside the prompt: new tokens, chunk, device."""
    return request.max_tokens, CHUNKS[kind_of(request.device)], request.device


# --- the work --------------------------------------------------------------------------------------------


def _read(generation: Any, token_ids: list[int], completion: Completion, console: Console) -> Any:
    """Read the prompt under a progress bar; returns the logits after it."""
    columns = (
        TextColumn("reading the context"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(token_ids), speed=0.0)

        def advance(done: int, total: int) -> None:
            completion.tokens_read, completion.prefill_seconds = done, time.perf_counter() - started
            progress.update(task, completed=done, speed=done / completion.prefill_seconds)

        logits = generation.prefill(token_ids, advance)
        completion.prefill_seconds = time.perf_counter() - started
    return logits


def _generate(
    generation: Any,
    logits: Any,
    request: Request,
    tokenizer: Tokenizer,
    healing: Healing,
    completion: Completion,
    write: Callable[[str], None],
) -> None:
    """Sample, write and read back token by token, until the file or text ends or max_tokens is reached."""
    ends = {*completion.config.eos_token_id, tokenizer.special_tokens.get(END_OF_FILE)}
    generator = torch.Generator().manual_seed(request.seed)
    stream = tokenizer.stream()
    started = time.perf_counter()
    while True:
        # A padded vocabulary has logits beyond the last token.
        allowed = healing.restrict(logits[: tokenizer.vocab_size])
        token_id = sample(allowed, request.temperature, generator)
        if token_id in ends:
            completion.stopped_by = "end"
            break
        completion.token_ids.append(token_id)
        text = stream.push(token_id, healing.accept(token_id))
        completion.text += text
        write(text)
        if len(completion.token_ids) == request.max_tokens:
            completion.stopped_by = "max_tokens"
            break
        logits = generation.step(token_id)
        completion.decode_steps += 1
        completion.decode_seconds = time.perf_counter() - started
    rest = stream.finish()
    completion.text += rest
    write(rest)


def _ending(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """The last lines of the prompt, to show what the completion goes on from."""
    return "".join(tokenizer.decode(prompt.token_ids[-160:]).splitlines(keepends=True)[-8:])
