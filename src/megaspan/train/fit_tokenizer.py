"""Fit the byte-level BPE of the shipped model on a sample of the training split."""

import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from megaspan.errors import UserError
from megaspan.train.corpus import Repository, progress_bar, read_repositories
from megaspan.train.manifest import fetch, load_manifest

CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>", "<|repository|>", "<|file|>"),
)
"""GLM's chat, tool and fill-in tokens, then the two that frame a repository. They take the last ids."""

SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with at most one character before it: a space, a dot, an underscore
    r"|\p{N}{1,3}"  # digits in groups of at most three
    r"| ?[^\s\p{L}\p{N}]+"  # punctuation
    r"|\s*[\r\n]+[ \t]*"  # line ends with the next line's whole indentation
    r"|\s+(?!\S)|\s+"  # other white space, leaving one space to the word that follows
)


def train_backend(texts: Iterable[str], vocab_size: int) -> Backend:
    """A BPE of exactly `vocab_size` entries in all: 256 bytes, merges, then SPECIAL_TOKENS."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocab_size - len(SPECIAL_TOKENS):
        raise UserError(
            f"the text is too little for {vocab_size} tokens; give more text or ask for fewer tokens"
        )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return backend


def sample(repositories: Iterable[Repository], share: float) -> Iterator[str]:
    """About `share` of the training files, by their paths' digests."""
    for repository in repositories:
        if repository.split == "train":
            for file in repository.files:
                if zlib.crc32(f"{repository.name}/{file.path}".encode()) < share * 2**32:
                    yield file.text


def fit_tokenizer(
    manifest: Path, folder: Path, wheels: Path, vocab_size: int = 12288, sample_share: float = 0.2
) -> None:
    """Write a tokenizer's files into `folder`. Same manifest, same bytes."""
    projects = load_manifest(manifest)
    texts: list[str] = []
    with progress_bar() as progress:
        fetch_bar = progress.add_task("fetching wheels", total=len(projects))
        fetch(
            projects,
            Path(wheels),
            lambda done, total: progress.update(fetch_bar, completed=done, total=total),
        )
        read_bar = progress.add_task("filtering", total=len(projects))
        for repository in read_repositories(projects, Path(wheels)):
            texts.extend(sample([repository], sample_share))
            progress.advance(read_bar)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        progress.add_task(f"fitting {vocab_size} tokens on {sum(map(len, texts)) / 1e6:.0f} M characters")
        backend = train_backend(texts, vocab_size)
    save_tokenizer(backend, folder)


def save_tokenizer(backend: Backend, folder: Path) -> None:
    """The files that transformers' AutoTokenizer wants, the chat template among them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": [token for token in SPECIAL_TOKENS if token != "<|endoftext|>"],
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name(CHAT_TEMPLATE), folder / CHAT_TEMPLATE)
