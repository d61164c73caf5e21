"""llama-index's OpenAI-like model: chats, completions, streams."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from tried import KEY, MODEL, ORDER, URL, run

always = {"api_base": f"{URL}/v1", "api_key": KEY, "model": MODEL, "max_tokens": 20, "max_retries": 0}
chat_model = OpenAILike(is_chat_model=True, **always)
text_model = OpenAILike(is_chat_model=False, **always)


def chat() -> None:
    assert chat_model.chat([ChatMessage(role="user", content=ORDER)]).message.content


def chat_streamed() -> None:
    assert list(chat_model.stream_chat([ChatMessage(role="user", content=ORDER)]))[-1].message.content


def complete() -> None:
    assert text_model.complete("The old house").text


run(chat, chat_streamed, complete)
