"""Small tokenizers of every kind that models come with, trained here on a few lines of text in several scripts."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and  then it sleeps.\n\tTwice!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Où ça?",
    "日本語のテキスト、漢字とかな。 Съешь же ещё этих мягких французских булок. 👩‍👩‍👧 🎉🎉",
] * 3
SPECIALS = ["<s>", "</s>", "<|im_start|>"]


def byte_level() -> Tokenizer:
    """As in Llama 3 and Qwen: every byte has a token, merges cross the borders of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("日本 é", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As in Llama 2, Mistral and Gemma: pieces with ▁ for a space, and <0xE2> for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in TEXTS if "日" not in text], trainer)
    # The trainer marks byte tokens as special, which no published tokenizer does: build it anew without that.
    rebuilt = Tokenizer(tokenizer.model)
    rebuilt.pre_tokenizer, rebuilt.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    rebuilt.add_special_tokens(SPECIALS)
    rebuilt.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rebuilt.token_to_id("<s>"))]
    )
    return rebuilt


def metaspace() -> Tokenizer:
    """As in T5: a unigram model, ▁ for a space, no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIALS, "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def words() -> Tokenizer:
    """The simplest there is: whole words and no decoder at all."""
    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *sorted(set(TEXTS[0].split()))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    builder.__name__: builder for builder in (byte_level, byte_fallback, metaspace, word_piece, words)
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Tokenizer]:
    """One of each, shared by all tests: do not change them."""
    return {name: build() for name, build in BACKENDS.items()}
