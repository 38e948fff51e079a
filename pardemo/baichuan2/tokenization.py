"""Baichuan2's tokenizer: the official ``tokenizer.model`` (SentencePiece BPE, byte fallback), without remote code."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pardemo import extras

with extras.needed_by(__name__):
    import sentencepiece

from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from pardemo.project import refuse_pointer

#: the reserved pieces that begin a user's and an assistant's message; 195 and 196 in the official vocabulary
USER, ASSISTANT = "<reserved_106>", "<reserved_107>"
_BEFORE_RESERVED = re.compile(r"(?<=<)(?=reserved_\d+>)")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    + USER
    + "{% elif message['role'] == 'assistant' %}"
    + ASSISTANT
    + "{% endif %}"
    "{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


class Baichuan2Tokenizer(SentencePieceBackend):
    """Text to token numbers and back; no BOS or EOS is added.

    Raises:
        ValueError: ``vocab_file`` is missing, a git-lfs pointer, or no SentencePiece model.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012, a name of Transformers
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str | None = None, **kwargs):
        _check_file(vocab_file)
        defaults = {
            "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>",
            "model_max_length": 4096, "padding_side": "left", "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        }  # fmt: skip
        kwargs = defaults | kwargs | {"special_tokens_pattern": "none"}
        kwargs.pop("auto_map", None)  # names of code in the model's folder, which is never run
        super().__init__(vocab_file=vocab_file, **kwargs)
        self.add_tokens([USER, ASSISTANT], special_tokens=True)
        if max(self.user_id, self.assistant_id) >= self.sp_model.get_piece_size():
            raise ValueError(f"{vocab_file} has no pieces {USER} and {ASSISTANT}: it is not Baichuan2's")

    @property
    def user_id(self) -> int:
        return self.convert_tokens_to_ids(USER)

    @property
    def assistant_id(self) -> int:
        return self.convert_tokens_to_ids(ASSISTANT)

    def text_ids(self, text: str) -> list[int]:
        """Token numbers of plain text: what looks like a special token in it is text as any other."""
        return [token for part in _BEFORE_RESERVED.split(text) for token in self.sp_model.encode(part)]

    def prompt_ids(self, messages: Sequence[Mapping[str, str]], most: int | None = None) -> list[int]:
        """The official layout of a conversation that the assistant is to answer.

        [system] then, per message, the reserved piece of its role and its text; the assistant's piece at the end. No
        BOS, no line breaks.

        Args:
            messages: of ``role`` (system, at the beginning; user; assistant) and ``content``.
            most: drop the oldest rounds until so many tokens are left; the last round stays, cut at its beginning.

        Raises:
            ValueError: no message, an unknown role, a system message that is not the first, or the last not a user's;
                a system message that fills ``most`` alone.
        """
        _check_messages(messages)
        system: list[int] = []
        rounds: list[list[int]] = []
        if messages[0]["role"] == "system":
            system, messages = self.text_ids(messages[0]["content"]), messages[1:]
        for message in messages:
            ids = [self.user_id if message["role"] == "user" else self.assistant_id, *self.text_ids(message["content"])]
            if message["role"] == "user" or not rounds:
                rounds.append(ids)
            else:
                rounds[-1] += ids
        room = None if most is None else most - len(system) - 1
        if room is not None and room < 1:
            raise ValueError(f"the system message has {len(system)} tokens, {most} are allowed in all")
        while room is not None and len(rounds) > 1 and sum(map(len, rounds)) > room:
            rounds.pop(0)
        conversation = [token for ids in rounds for token in ids]
        return system + (conversation if room is None else conversation[-room:]) + [self.assistant_id]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Pieces to text; bytes of a character that the vocabulary lacks are put together again."""
        special = set(self.all_special_tokens)
        runs = itertools.groupby(tokens, key=special.__contains__)
        return "".join("".join(run) if is_special else self.sp_model.decode_pieces([*run]) for is_special, run in runs)

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Text as token numbers arrive; a character whose bytes are not all there yet is held back."""
        waiting: list[int] = []
        for number in ids:
            waiting.append(number)
            text = self.decode(waiting, skip_special_tokens=True)
            if not text.endswith("\ufffd") or len(waiting) > 4:
                yield text
                waiting = []
        if waiting:
            yield self.decode(waiting, skip_special_tokens=True)


def load_tokenizer(folder: str | Path) -> Baichuan2Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        FileNotFoundError: it has no tokenizer.model. ValueError: that is a git-lfs pointer or no SentencePiece model.
    """
    path = Path(folder) / "tokenizer.model"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.model")
    _check_file(path)
    return Baichuan2Tokenizer.from_pretrained(str(folder))


def _check_file(path: str | Path | None) -> None:
    if path is None or not Path(path).is_file():
        raise ValueError(f"Baichuan2Tokenizer needs the file tokenizer.model, not {path}")
    with open(path, "rb") as file:
        refuse_pointer(path, file.read(100), "tokenizer")
    try:
        sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise ValueError(f"{path} is no SentencePiece model") from None


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    roles = [message.get("role") for message in messages]
    unknown = next((role for role in roles if role not in ("system", "user", "assistant")), None)
    if not roles or roles[-1] != "user":
        raise ValueError("a conversation ends with a user's message")
    if unknown is not None or "system" in roles[1:]:
        raise ValueError(f"roles are system (first only), user and assistant, not {unknown or 'system in between'}")
