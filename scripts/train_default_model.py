"""Trains the model that ships inside weft, in three stages.

    prepare    corpus -> tokenizer and token arrays     (CPU, minutes)
    train      token arrays -> a Hugging Face directory (one GPU, minutes; a CPU would take days)
    evaluate   a Hugging Face directory -> its losses on the held-out books and dialogs

The corpus is a folder with `stories.txt.xz` (books, `<|endofbook|>` between them), `stories.tsv` (their titles, in the
same order) and `coffee-dialogs.jsonl.xz` (`{"messages": [{"role", "content"}, ...]}` a line).

    python scripts/train_default_model.py prepare --corpus CORPUS --data /tmp/data
    python scripts/train_default_model.py train --data /tmp/data --out src/weft/default_model
    python scripts/train_default_model.py evaluate --data /tmp/data --model src/weft/default_model

Needs torch, tokenizers, safetensors and numpy. The model card (README.md of the model) is written by hand.
"""

import argparse
import json
import lzma
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from default_model_chat import ASK_MORE, STORYTELLERS, Dialog, conversation
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT, SYSTEM, USER, ASSISTANT, END = range(5)
SPECIAL_TOKENS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] in ['user', 'assistant'] %}{{ '<|' + message['role'] + '|>' }}{% else %}{{ '<|system|>' }}"
    "{% endif %}{{ (message['content'] or '') | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
"""No token crosses these pieces. Digits stand alone and a paragraph break is a token of its own."""

HELD_OUT_EVERY = 20
"""Every so many books and dialogs, one is never trained on."""

UNWANTED = re.compile(
    r"\b(nigg(er|ah|uh)|(dark(y|ies|ey)|coons?|kikes?|dago(e?s)?|sheen(y|ies))\b|pi(cc|ck)aninn"
    r"|fuck|cunt|shit|whore|bitch)",
    re.IGNORECASE,
)
"""Paragraphs with these words are left out: a model this small repeats them without sense or context."""

CHAT_ROWS, CHAT_LENGTH = 8192, 512
LONG_CHAT_ROWS, LONG_CHAT_LENGTH = 256, 16384
OPENING_LENGTH = 128


@dataclass(frozen=True)
class Shape:
    """The fields of config.json that the weights depend on."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 16384
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class Phase:
    """A phase of the training, up to a share of the whole. A step has the same number of tokens in every phase."""

    until: float
    rows: int
    length: int


PHASES = (Phase(0.3, 64, 2048), Phase(0.75, 16, 8192), Phase(1.0, 8, 16384))
CHAT_FROM = 0.65
"""From this share on a step also sees chats, and openings: short rows from the start of a paragraph. Without them the
model would hardly know how to go on from a prompt of one word, as only one token in 2048 is the first of its row."""
CHAT_ROWS_A_STEP, CHAT_WEIGHT = 16, 0.1
OPENING_ROWS_A_STEP, OPENING_WEIGHT = 64, 0.05
WARMUP, DECAY_FROM = 0.02, 0.4
"""Shares too: the learning rates rise, stay, and fall to zero."""
MATRIX_LR, EMBEDDING_LR = 4e-3, 3e-3
WEIGHT_DECAY, DROPOUT = 0.4, 0.2

POSITION_RANGES = ((512, 1024), (1024, 2048), (2048, 4096), (4096, 8192), (8192, 16384))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    stage = stages.add_parser("prepare", help="train the tokenizer and tokenize the corpus")
    corpus = os.environ.get("WEFT_CORPUS")
    stage.add_argument(
        "--corpus",
        type=Path,
        default=corpus,
        required=corpus is None,
        help="folder of the corpus (default: $WEFT_CORPUS)",
    )
    stage.add_argument("--data", type=Path, required=True, help="folder for tokenizer.json and data.npz")
    stage = stages.add_parser("train", help="train, measure and write a Hugging Face directory")
    stage.add_argument("--data", type=Path, required=True, help="what prepare wrote")
    stage.add_argument("--out", type=Path, required=True, help="folder for the model and training.json")
    stage.add_argument("--tokens", type=float, default=746, help="millions of tokens to train on (default: 746)")
    stage.add_argument(
        "--minutes", type=float, default=math.inf, help="shorten the whole schedule to fit this (default: no limit)"
    )
    stage.add_argument("--seed", type=int, default=1)
    stage = stages.add_parser("evaluate", help="measure a directory's losses again, in float32")
    stage.add_argument("--data", type=Path, required=True, help="what prepare wrote")
    stage.add_argument("--model", type=Path, required=True, help="the Hugging Face directory")
    stage.add_argument("--books", type=int, help="only the first so many held-out books (a CPU is slow)")
    arguments = parser.parse_args()
    match arguments.stage:
        case "prepare":
            prepare(arguments.corpus, arguments.data)
        case "train":
            train(arguments.data, arguments.out, arguments.tokens * 1e6, arguments.minutes * 60, arguments.seed)
        case "evaluate":
            report = evaluate_directory(arguments.model, Data.load(arguments.data), arguments.books)
            print(json.dumps(report, indent=2))


# ---------------------------------------------------------------------------------------------------------- prepare


@dataclass(frozen=True)
class Data:
    """Tokens to sample from. `openings` are the indices in `books` at which a paragraph starts. `dialogs` is padded
    with -1, and `replies` marks the assistant's tokens in it.
    """

    books: np.ndarray
    openings: np.ndarray
    held_out_books: list[np.ndarray]
    held_out_bytes: int
    chat: np.ndarray
    long_chat: np.ndarray
    dialogs: np.ndarray
    replies: np.ndarray

    def save(self, folder: Path) -> None:
        lengths = [len(book) for book in self.held_out_books]
        arrays = {**vars(self), "held_out_books": np.concatenate(self.held_out_books), "held_out_lengths": lengths}
        np.savez_compressed(folder / "data.npz", **arrays)

    @classmethod
    def load(cls, folder: Path) -> "Data":
        arrays = dict(np.load(folder / "data.npz"))
        borders = np.cumsum(arrays.pop("held_out_lengths"))[:-1]
        arrays["held_out_books"] = np.split(arrays["held_out_books"], borders)
        arrays["held_out_bytes"] = int(arrays["held_out_bytes"])
        return cls(**arrays)


def prepare(corpus: Path, folder: Path, seed: int = 1) -> None:
    rng = random.Random(seed)
    say(f"reading {corpus}")
    titles = [line.split("\t")[0] for line in (corpus / "stories.tsv").read_text("utf-8").splitlines()[1:]]
    with lzma.open(corpus / "stories.txt.xz", "rt", encoding="utf-8") as file:
        books = [clean(book) for book in file.read().split("<|endofbook|>")]
    if len(books) != len(titles):
        sys.exit(f"stories.txt.xz has {len(books)} books but stories.tsv names {len(titles)}")
    held_out = [number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 for number in range(len(books))]
    train_books = [book for book, out in zip(books, held_out, strict=True) if not out]
    held_out_books = [book for book, out in zip(books, held_out, strict=True) if out]
    shelf = [
        book.split("\n\n")
        for book, title, out in zip(books, titles, held_out, strict=True)
        if not out and title.startswith(STORYTELLERS)
    ]
    dialogs = read_dialogs(corpus / "coffee-dialogs.jsonl.xz")
    held_out_dialogs = dialogs[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    coffee = [dialog for dialog in dialogs if dialog not in held_out_dialogs]
    for title, out in zip(titles, held_out, strict=True):
        if out:
            say(f"  held out: {title}")
    say(f"  {len(train_books)} books and {len(coffee)} dialogs to train on; {len(held_out_dialogs)} dialogs held out")

    folder.mkdir(parents=True, exist_ok=True)
    conversations = [conversation(rng, coffee, shelf) for _ in range(CHAT_ROWS * 4)]
    say("training the tokenizer")
    tokenizer = train_tokenizer([*train_books, *(render(messages) for messages in conversations[:2000])])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)

    say("tokenizing")
    encoded = [encode(tokenizer, book) for book in train_books]
    stream = np.concatenate([np.append(book, np.uint16(END_OF_TEXT)) for book in encoded])
    dialog_tokens, replies = encode_dialogs(tokenizer, held_out_dialogs)
    (paragraph_break,) = tokenizer.encode("\n\n").ids
    data = Data(
        books=stream,
        openings=np.flatnonzero(stream[: -OPENING_LENGTH - 1] == paragraph_break) + 1,
        held_out_books=[encode(tokenizer, book) for book in held_out_books],
        held_out_bytes=sum(len(book.encode()) for book in held_out_books),
        chat=chat_rows(tokenizer, conversations),
        long_chat=long_chat_rows(rng, tokenizer, encoded, paragraph_break, conversations),
        dialogs=dialog_tokens,
        replies=replies,
    )
    data.save(folder)
    held_out_tokens = sum(map(len, data.held_out_books))
    say(f"{len(data.books):,} training tokens, {data.chat.size:,} of chat, {data.long_chat.size:,} of long chat")
    say(f"{held_out_tokens:,} tokens held out, {data.held_out_bytes / held_out_tokens:.2f} bytes a token")


def clean(book: str) -> str:
    return "\n\n".join(paragraph for paragraph in book.strip().split("\n\n") if not UNWANTED.search(paragraph))


def read_dialogs(path: Path) -> list[Dialog]:
    """The dialogs as (role, content) pairs, with ASCII quotes, each ending with the assistant's last message."""
    dialogs = []
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            dialog = [(m["role"], m["content"].replace("’", "'").strip()) for m in json.loads(line)["messages"]]
            while dialog[-1][0] != "assistant":
                dialog.pop()
            dialogs.append(dialog)
    return dialogs


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so every text has an encoding. Encoding adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=Shape.vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.get_vocab_size() == Shape.vocab_size
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes pieces that end at a paragraph break, which no token crosses: fast on many cores, and the same tokens."""
    pieces = text.replace("\n\n", "\n\n\0").split("\0")
    return np.concatenate([np.array(piece.ids, np.uint16) for piece in tokenizer.encode_batch(pieces)])


def render(messages: Dialog) -> str:
    """The text that CHAT_TEMPLATE makes of a finished conversation."""
    return "".join(f"<|{role}|>{content.strip()}<|end|>" for role, content in messages)


def encode_dialogs(tokenizer: Tokenizer, dialogs: list[Dialog]) -> tuple[np.ndarray, np.ndarray]:
    rows = []
    for dialog in dialogs:
        turns = [(role, tokenizer.encode(render([(role, content)])).ids) for role, content in dialog]
        tokens = [token for _, ids in turns for token in ids]
        reply = [role == "assistant" and place > 0 for role, ids in turns for place in range(len(ids))]
        rows.append((tokens, reply))
    width = max(len(tokens) for tokens, _ in rows)
    padded = np.array([tokens + [-1] * (width - len(tokens)) for tokens, _ in rows], np.int32)
    replies = np.array([reply + [False] * (width - len(reply)) for _, reply in rows])
    return padded, replies


def chat_rows(tokenizer: Tokenizer, conversations: list[Dialog]) -> np.ndarray:
    """Each row starts with a fresh conversation and is filled up with further ones; the last is cut off."""
    encoded = iter(tokenizer.encode_batch([render(messages) for messages in conversations]))
    rows = np.empty((CHAT_ROWS, CHAT_LENGTH + 1), np.uint16)
    for row in rows:
        tokens: list[int] = []
        while len(tokens) < len(row):
            tokens += [*next(encoded).ids, END_OF_TEXT]
        row[:] = tokens[: len(row)]
    return rows


def long_chat_rows(
    rng: random.Random,
    tokenizer: Tokenizer,
    books: list[np.ndarray],
    paragraph_break: int,
    conversations: list[Dialog],
) -> np.ndarray:
    """A user pastes a long piece of a book, has it continued again and again, and chats of other things in between."""
    books = [book for book in books if len(book) > 3 * LONG_CHAT_LENGTH]
    ask, *more = [tokenizer.encode(text).ids for text in ("Continue this story:\n\n", *ASK_MORE)]
    rows = np.empty((LONG_CHAT_ROWS, LONG_CHAT_LENGTH + 1), np.uint16)
    for row in rows:
        book = rng.choice(books)
        breaks = np.flatnonzero(book == paragraph_break)
        at = breaks[np.searchsorted(breaks, rng.randrange(len(book) - 3 * LONG_CHAT_LENGTH))] + 1

        def read(length: int, book: np.ndarray = book, breaks: np.ndarray = breaks) -> list[int]:
            nonlocal at
            first, at = at, breaks[np.searchsorted(breaks, at + length)] + 1
            return book[first : at - 1].tolist()

        tokens = [USER, *ask, *read(int(2 ** rng.uniform(8, math.log2(LONG_CHAT_LENGTH))))]
        while len(tokens) < len(row):
            tokens += [END, ASSISTANT, *read(rng.randint(80, 400)), END]
            while rng.random() < 0.3:
                tokens += tokenizer.encode(render(rng.choice(conversations))).ids
            tokens += [USER, *rng.choice(more)]
        row[:] = tokens[: len(row)]
    return rows


# ------------------------------------------------------------------------------------------------------------ model


class Llama(nn.Module):
    """A Llama with Hugging Face's tensor names, and dropout on what every layer adds."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers)),
                "norm": Norm(shape),
            }
        )
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = (2 * shape.num_hidden_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The final hidden states; the residual stream has the given type, as it will when the model is served."""
        x = self.model["embed_tokens"](tokens).to(dtype)
        rotation = rope(tokens.shape[1], self.shape, tokens.device)
        for layer in self.model["layers"]:
            x = layer(x, *rotation)
        return self.model["norm"](x)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return token_losses(hidden, self.model["embed_tokens"].weight, targets)


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rope(length: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


# --------------------------------------------------------------------------------------------------------- training


def train(folder: Path, out: Path, total_tokens: float, seconds: float, seed: int) -> None:
    torch.manual_seed(seed)
    device, dtype = pick_device()
    data = Data.load(folder)
    model = Llama(Shape(), DROPOUT).to(device)
    matrices = [weight for weight in model.model["layers"].parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=EMBEDDING_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"),
    ]
    token_losses_here = token_losses
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model["layers"]:
            layer.compile(dynamic=False)
        token_losses_here = torch.compile(token_losses, dynamic=False)

    def backward(rows: Tensor, weight: float) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            hidden = model(rows[:, :-1], dtype)
            loss = token_losses_here(hidden, model.model["embed_tokens"].weight, rows[:, 1:]).mean()
        (loss * weight).backward()
        return loss.detach()

    books = torch.from_numpy(data.books.astype(np.int32)).to(device)
    held_out = np.concatenate(data.held_out_books)
    chat = cycle(torch.from_numpy(data.chat.astype(np.int64)).to(device), CHAT_ROWS_A_STEP)
    long_chat = cycle(torch.from_numpy(data.long_chat.astype(np.int64)).to(device), 1)
    starts = cycle(torch.from_numpy(data.openings).to(device), OPENING_ROWS_A_STEP)
    openings = (rows_at(books, batch, OPENING_LENGTH) for batch in starts)
    windows = {phase: cut(books, phase) for phase in PHASES}
    parameters = sum(weight.numel() for weight in model.parameters())
    say(
        f"{parameters:,} parameters on {device_name(device)}; {len(books):,} tokens of books, {total_tokens:,.0f} to do"
    )

    started = time.monotonic()
    steps, tokens, reported = 0, 0, time.monotonic()
    model.train()
    while (progress := max(tokens / total_tokens, (time.monotonic() - started) / seconds)) < 1:
        phase = next(phase for phase in PHASES if progress < phase.until)
        rate = min(1.0, progress / WARMUP + 1e-3, (1 - progress) / (1 - DECAY_FROM))
        for optimizer, lr in zip(optimizers, (MATRIX_LR, EMBEDDING_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
        rows, weight = next(windows[phase]), 1.0
        if progress >= CHAT_FROM:
            rows = torch.cat([rows[1:], next(long_chat)[:, : phase.length + 1]])
            backward(next(chat), CHAT_WEIGHT)
            backward(next(openings), OPENING_WEIGHT)
            weight -= CHAT_WEIGHT + OPENING_WEIGHT
            tokens += CHAT_ROWS_A_STEP * CHAT_LENGTH + OPENING_ROWS_A_STEP * OPENING_LENGTH
        loss = backward(rows, weight)
        tokens += phase.rows * phase.length
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        if steps % 20 == 0:
            loss.item()  # Waits for the device, so that the clock above includes the device's time.
        if time.monotonic() - reported > 15:
            reported = time.monotonic()
            speed = tokens / (reported - started)
            seen, unseen = (spot_loss(model, stream, 2048, device, dtype) for stream in (data.books, held_out))
            say(
                f"{progress:6.1%}  step {steps}  {tokens / 1e6:.0f}M tokens  {speed / 1e3:.0f}k/s  "
                f"rows of {phase.length}  loss on training books {seen:.3f}, on held-out books {unseen:.3f}"
            )
            model.train()
    elapsed = time.monotonic() - started
    write_model(model, folder, out)
    say(f"{steps} steps, {tokens:,} tokens in {elapsed:.0f} s; measuring")
    report = {
        "parameters": parameters,
        "device": device_name(device),
        "steps": steps,
        "tokens": tokens,
        "seconds": elapsed,
        "train_loss": spot_loss(model, data.books, 8192, device, dtype),
        **evaluate(model, data, device, dtype),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def cut(stream: Tensor, phase: Phase) -> Iterator[Tensor]:
    """Rows that cover the stream once per epoch, cut at other places in every epoch."""
    while True:
        offset = int(torch.randint(phase.length, ()))
        starts = torch.arange(offset, len(stream) - phase.length - 1, phase.length)
        for batch in starts[torch.randperm(len(starts))].to(stream.device).split(phase.rows)[:-1]:
            yield rows_at(stream, batch, phase.length)


def rows_at(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """`length` tokens from each start, and the token after them: inputs and targets overlap."""
    return stream[starts[:, None] + torch.arange(length + 1, device=stream.device)].long()


def cycle(rows: Tensor, batch: int) -> Iterator[Tensor]:
    """Batches of the rows without end, in a new order every time round."""
    while True:
        for chosen in torch.randperm(len(rows)).to(rows.device).split(batch):
            if len(chosen) == batch:
                yield rows[chosen]


def pick_device() -> tuple[torch.device, torch.dtype]:
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def write_model(model: Llama, folder: Path, out: Path) -> None:
    """Writes a Hugging Face directory. Also rounds the model itself to bfloat16, in which it is written."""
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    weights = {name: weight.detach().bfloat16().cpu().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [END_OF_TEXT, END],
        "pad_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [END_OF_TEXT, END],
        "pad_token_id": END_OF_TEXT,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluate_directory(directory: Path, data: Data, books: int | None) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    model = Llama(Shape(**{field: config[field] for field in asdict(Shape())}))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    device, _ = pick_device()
    return evaluate(model.to(device), data, device, torch.float32, books)


@torch.no_grad()
def evaluate(
    model: Llama, data: Data, device: torch.device, dtype: torch.dtype, books: int | None = None
) -> dict[str, Any]:
    """Nats per token. `by_position` scores the same tokens in every range: only the length before them differs."""
    chosen = [torch.from_numpy(book.astype(np.int64)).to(device) for book in data.held_out_books[:books]]
    pieces = [piece for book in chosen for piece in book.split(8192)]
    overall = torch.cat([score(model, piece[None], dtype)[0] for piece in pieces]).mean().item()
    by_position = {}
    widest = POSITION_RANGES[-1][0]
    for first, last in POSITION_RANGES:
        assert last == 2 * first, "so that the second halves of the windows tile a book"
        windows = [
            book[start - first : start + first]
            for book in chosen
            for start in range(widest, len(book) // widest * widest, first)
        ]
        batches = torch.stack(windows).split(2 * widest // last)
        scored = torch.cat([score(model, batch, dtype)[:, first - 1 :] for batch in batches])
        by_position[f"{first}-{last}"] = scored.mean().item()
    dialogs = torch.from_numpy(data.dialogs.astype(np.int64)).to(device)
    replies = torch.from_numpy(data.replies).to(device)[:, 1:]
    report = {
        "held_out_loss": overall,
        "by_position": by_position,
        "tokens_by_position": sum(len(book) // widest * widest - widest for book in chosen),
        "dialog_reply_loss": score(model, dialogs.clamp(min=0), dtype)[replies].mean().item(),
    }
    if books is None:
        tokens = sum(map(len, data.held_out_books))
        report["held_out_bits_a_byte"] = overall * tokens / data.held_out_bytes / math.log(2)
    return report


@torch.no_grad()
def spot_loss(model: Llama, stream: np.ndarray, length: int, device: torch.device, dtype: torch.dtype) -> float:
    """Loss on 64 windows of `length` tokens, spread evenly."""
    starts = np.linspace(0, len(stream) - length, 64).astype(int)
    windows = torch.stack([torch.from_numpy(stream[start : start + length].astype(np.int64)) for start in starts])
    return torch.cat([score(model, batch.to(device), dtype) for batch in windows.split(8)]).mean().item()


def score(model: Llama, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The loss of every token except the first of each row."""
    model.eval()
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32),
    ):
        return model.losses(model(tokens, dtype), tokens.roll(-1, 1))[:, :-1]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    main()
