import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.text.conftest import BACKENDS, TEXTS, byte_fallback, byte_level, words
from weft.errors import ModelError, RequestError
from weft.text.tokenizer import Tokenizer


def save(path: Path, backend=None, **files) -> Path:
    """A model directory; the keywords are JSON files."""
    (backend or byte_level()).save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture(scope="module")
def tokenizers(backends):
    return {name: Tokenizer(backend) for name, backend in backends.items()}


@given(text=st.text())
@settings(deadline=None)
def test_byte_level_text_survives_a_round_trip(tokenizers, text):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("name", BACKENDS)
def test_encodes_and_decodes_like_transformers(tokenizers, backends, name):
    ours, theirs = tokenizers[name], PreTrainedTokenizerFast(tokenizer_object=backends[name])
    for text in [*TEXTS, "", " ", "<s>Hello</s> <|im_start|>"]:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )


def test_a_batch_is_encoded_like_its_texts(tokenizers):
    tokenizer = tokenizers["byte_fallback"]
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_a_directory_without_tokenizer_works_with_ids_only(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    assert Tokenizer.load(tmp_path / "missing") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', "\ufffd\x00"])
def test_a_broken_tokenizer_is_one_clear_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer: \S") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_tokenizer_config_is_one_clear_line(tmp_path, content):
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.load(save(tmp_path, tokenizer_config=content))


def test_special_tokens_are_strings_or_objects_in_either_file(tmp_path):
    save(
        tmp_path,
        special_tokens_map={"bos_token": "<s>", "eos_token": "<s>", "unk_token": {"content": "<|im_start|>"}},
        tokenizer_config={"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "add_bos_token": False},
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<|im_start|>"}
    assert tokenizer.bos_token_id == tokenizer.token_id("<s>") is not None
    assert tokenizer.eos_token_id == tokenizer.token_id("</s>")
    assert tokenizer.special_token_ids == {tokenizer.token_id(t) for t in ("<s>", "</s>", "<|im_start|>")}


def test_a_named_token_is_special_even_if_tokenizer_json_does_not_say_so(tmp_path):
    tokenizer = Tokenizer.load(save(tmp_path, words(), tokenizer_config={"eos_token": "dog,", "unk_token": "no such"}))
    assert tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.token_id("no such") is None
    assert tokenizer.decode(tokenizer.encode("quick dog,")) == "quick"


def test_the_beginning_token_is_added_once(tmp_path):
    bos = {"bos_token": "<s>", "add_bos_token": True}
    by_processor = Tokenizer.load(save(tmp_path, byte_fallback(), tokenizer_config=bos))
    assert by_processor.encode("fox").count(by_processor.bos_token_id) == 1
    by_config = Tokenizer.load(save(tmp_path, byte_level(), tokenizer_config=bos))
    assert by_config.encode("fox")[0] == by_config.bos_token_id
    assert by_config.encode("fox")[1:] == by_config.encode("fox", add_special_tokens=False)
    assert by_config.encode_batch(["fox", ""])[1] == [by_config.bos_token_id]
    unnamed = Tokenizer.load(save(tmp_path, byte_level(), tokenizer_config={"add_bos_token": True}))
    assert unnamed.encode("fox") == unnamed.encode("fox", add_special_tokens=False)


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=512)
    tokenizer = Tokenizer.load(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_ids_outside_the_vocabulary_are_skipped_and_nonsense_is_refused(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("fox")
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7]) == "fox"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    for bad in ([-1], [2**40], ["a"]):
        with pytest.raises(RequestError, match="token ids"):
            tokenizer.decode(bad)
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("half a pair: \ud83d")


def test_one_token_is_shown_with_its_space_and_its_bytes(tokenizers):
    llama, qwen = tokenizers["byte_fallback"], tokenizers["byte_level"]
    piece = llama.encode("the the", add_special_tokens=False)[-1]
    assert llama.token_text(piece).startswith(" ")
    assert llama.token_bytes(piece, first=True) == llama.token_bytes(piece).removeprefix(b" ")
    assert llama.token_bytes(llama.token_id("<0xE2>")) == b"\xe2"
    assert qwen.token_text(qwen.token_id("Ġ")) == " "
    assert qwen.token_text(qwen.encode("\u2603")[0]) == "\ufffd"
    assert qwen.token_text(qwen.token_id("<|im_start|>")) == "<|im_start|>"


def test_encoding_a_long_prompt_lets_other_threads_run(tokenizers):
    """Held GIL = every stream of the API process stands still for the length of somebody's prompt."""
    text, ticks, done = "".join(TEXTS) * 300, [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    tokenizers["byte_level"].encode(text)
    finished = time.perf_counter()
    done.set()
    thread.join()
    assert sum(started < t < finished for t in ticks) >= 5


def test_a_post_processor_that_adds_the_end_is_honoured(tmp_path):
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    assert Tokenizer.load(save(tmp_path, backend)).encode("fox")[-1] == 1
