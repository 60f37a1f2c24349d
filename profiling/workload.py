"""Prompts to profile and validate on: built-in sets, prompt files, and their two halves."""

from __future__ import annotations

import codecs
import hashlib
import json
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from hsdopt.errors import WorkloadError
from hsdopt.files import LARGEST_DOCUMENT, excerpt, parse_json, read_document
from hsdopt.profiling.importers import DATASETS, dataset_lines

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

BUILT_IN = ("mixed", "copy", "chat")
"""Names of the built-in evaluation sets."""

TRAINING = "training"
"""Name of the built-in set for training drafters; it shares no prompt with the evaluation sets."""

DEFAULT_TASK = "default"
"""Task of a prompt whose file names none."""

LARGEST_PROMPT_FILE = 256 * 2**20
"""Bytes of the largest prompt file that is read."""

Role = Literal["system", "user", "assistant"]


class Tokenizer(Protocol):
    """What `render` needs of a tokenizer; those of transformers have it."""

    chat_template: Any

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens the tokenizer adds by itself."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> list[int]:  # noqa: ANN401 -- transformers' options are open
        """Return the token ids of a conversation."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Parameters
    ----------
    role
        Who speaks: "system", "user" or "assistant".
    content
        What is said.
    """

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to a model: a text or a conversation, never both.

    Parameters
    ----------
    id
        Name of the prompt, unique within its workload.
    text
        The request as plain text, or None for a conversation.
    messages
        The conversation, ending with the user's turn; empty for plain text.
    reference
        A right answer, where there is one.
    task
        Kind of request; both halves of a workload hold every task.

    Examples
    --------
    >>> Prompt("greeting", "Say hello.").messages
    ()
    """

    id: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    reference: str | None = None
    task: str = DEFAULT_TASK

    def __post_init__(self) -> None:
        """Refuse a prompt with both a text and messages, or neither."""
        if (self.text is None) == (not self.messages):
            raise WorkloadError(f"expected a text or messages for prompt {self.id!r}, got both or neither")

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The prompt as messages; a text is a single message of the user's.

        Examples
        --------
        >>> Prompt("greeting", "Say hello.").conversation
        (Message(role='user', content='Say hello.'),)
        """
        return self.messages if self.text is None else (Message("user", self.text),)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named tuple of prompts that splits into a profiling and a validation half.

    Parameters
    ----------
    name
        Name of the built-in set, or of the file the prompts came from.
    prompts
        At least one prompt, in file order.

    Examples
    --------
    >>> workload = Workload("two", (Prompt("a", "One?"), Prompt("b", "Two?")))
    >>> len(workload), workload.validation.prompts[0].id
    (2, 'b')
    """

    name: str
    prompts: tuple[Prompt, ...]

    def __post_init__(self) -> None:
        """Refuse an empty workload and prompts that share an id."""
        if not self.prompts:
            raise WorkloadError(f"expected at least one prompt, got none in {self.name}: add a prompt")
        ids = [prompt.id for prompt in self.prompts]
        repeated = next((name for name in ids if ids.count(name) > 1), None)
        if repeated is not None:
            raise WorkloadError(f"expected a different id for every prompt of {self.name}, got {repeated!r} twice")

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        """Return an iterator over the prompts in file order."""
        return iter(self.prompts)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, each once, in the order of their first prompts."""
        return tuple(dict.fromkeys(prompt.task for prompt in self.prompts))

    @property
    def sha256(self) -> str:
        """Hexadecimal hash of the prompts in their order; the name is not part of it."""
        contents = json.dumps([asdict(prompt) for prompt in self.prompts], sort_keys=True)
        return hashlib.sha256(contents.encode()).hexdigest()

    @property
    def profiling(self) -> Workload:
        """The half to profile on; as large as the validation half, or larger by one request.

        Requests alternate between the halves within each task, so both halves hold every task of
        at least two; how other tasks are mixed in between does not matter. A request that
        occurs several times stays in one half, so the other half is held out indeed.

        Raises
        ------
        WorkloadError
            If there are fewer than two different requests.
        """
        return self._half(0)

    @property
    def validation(self) -> Workload:
        """The half to validate on; see `profiling`.

        Raises
        ------
        WorkloadError
            If there are fewer than two different requests.
        """
        return self._half(1)

    def take(self, count: int) -> Workload:
        """Return at most `count` prompts in file order, spread evenly over the tasks.

        Raises
        ------
        WorkloadError
            If `count` is less than 1.

        Examples
        --------
        >>> [prompt.task for prompt in load_workload("mixed").take(3)]
        ['summarising', 'rewriting', 'extraction']
        """
        if count < 1:
            raise WorkloadError(f"expected to take at least 1 prompt, got {count}")
        turns = _turns_in_task(self.prompts)
        chosen = sorted(range(len(self.prompts)), key=turns.__getitem__)[:count]
        return Workload(self.name, tuple(self.prompts[index] for index in sorted(chosen)))

    def _half(self, parity: int) -> Workload:
        by_task = sorted(self.prompts, key=lambda prompt: prompt.task)
        requests = list(dict.fromkeys(prompt.conversation for prompt in by_task))
        if len(requests) < 2:
            raise WorkloadError(
                f"expected at least 2 different prompts to split {self.name} into a profiling and a "
                f"validation half, got {len(requests)}: add another prompt"
            )
        chosen = set(requests[parity::2])
        half = ("profiling", "validation")[parity]
        prompts = tuple(prompt for prompt in self.prompts if prompt.conversation in chosen)
        return Workload(f"{self.name}/{half}", prompts)


def load_workload(source: str | os.PathLike[str]) -> Workload:
    """Return the workload of a built-in name, a published data set or a prompt file.

    Parameters
    ----------
    source
        "mixed", "copy", "chat" or "training"; "cnn_dailymail", "xsum", "iwslt2017-de-en" or "gsm8k", of whose
        test split the first rows are taken through `datasets`; or the path of a file in UTF-8. A `.txt`
        file holds one prompt a line, and blank lines do not count. Any other file holds JSON lines, each an
        object with either `prompt` (a string) or `messages` (a list of objects with `role` and
        `content`, the last of them the user's), and optionally `reference`, `task` and `id`; other keys
        are ignored. A file named like a set is reached as `./mixed`.

    Raises
    ------
    WorkloadError
        If the file or data set cannot be read, a line is not as described, or there is no prompt.
    MissingExtraError
        If a data set is asked for and `datasets` is not installed.

    Examples
    --------
    >>> len(load_workload("mixed"))
    40
    """
    if source in (*BUILT_IN, TRAINING):
        data = resources.files("hsdopt.profiling").joinpath("data", f"{source}.jsonl").read_bytes()
        return Workload(str(source), _parse_json_lines(_decode(data, str(source)), str(source)))
    if source in DATASETS:
        lines = enumerate(dataset_lines(str(source)), 1)
        checked = (_validated(line, f"{source}, prompt {number}").to_prompt(number) for number, line in lines)
        return Workload(str(source), tuple(checked))
    path = Path(source)
    text = _decode(_read(path), str(path))
    plain = path.suffix.lower() == ".txt"
    prompts = _parse_plain_text(text) if plain else _parse_json_lines(text, str(path))
    return Workload(str(path.absolute()), prompts)  # a profile names its workload, wherever it is read


def render(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids that a model is fed for a prompt.

    A tokenizer with a chat template renders the conversation and opens the assistant's turn. Without
    one, a text is encoded as it is, and a conversation as lines "role: content" with an open
    "assistant:" line at the end.

    Parameters
    ----------
    prompt
        The request.
    tokenizer
        A tokenizer of transformers, or anything with the same three members.

    Raises
    ------
    WorkloadError
        If the chat template refuses the conversation, or no token comes out.
    """
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(_plain(prompt))
    else:
        tokens = _apply_chat_template(prompt, tokenizer)
    if not tokens:
        raise WorkloadError(f"expected at least one token for prompt {prompt.id!r}, got none: lengthen it")
    return list(tokens)


def turn(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after a request that are the same whatever it says.

    Without a chat template these are the special tokens that the tokenizer adds by itself, if any.
    """
    one, other = (render(Prompt("request", text), tokenizer) for text in ("Why is it so?", "2 + 3 ="))
    before = _alike(one, other)
    after = _alike(one[before:][::-1], other[before:][::-1])
    return tuple(one[:before]), tuple(one[len(one) - after :])


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many of the first tokens are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _encodable(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"expected Unicode text, got half of a surrogate pair in {_shorten(ascii(text))}")
    return text


_Text = Annotated[str, AfterValidator(_encodable)]


class _MessageLine(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Role
    content: _Text


class _PromptLine(BaseModel):
    """A line of a prompt file; keys not named here are ignored."""

    model_config = ConfigDict(strict=True)

    id: _Text | None = None
    task: _Text = DEFAULT_TASK
    prompt: _Text | None = None
    messages: list[_MessageLine] | None = None
    reference: _Text | None = None

    @field_validator("id", mode="before")
    @classmethod
    def _accept_numbers(cls, value: object) -> object:
        return str(value) if type(value) is int else value

    @model_validator(mode="after")
    def _one_request(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            given = "neither" if self.prompt is None else "both"
            raise ValueError(f"expected either prompt or messages, got {given}")
        if self.messages is not None and (not self.messages or self.messages[-1].role != "user"):
            last = f"the {self.messages[-1].role}'s" if self.messages else "no message"
            raise ValueError(f"expected messages that end with the user's, got {last}")
        last_text = self.prompt if self.messages is None else self.messages[-1].content
        if last_text is None or not last_text.strip():
            raise ValueError("expected a prompt with some text, got an empty one")
        return self

    def to_prompt(self, number: int) -> Prompt:
        messages = tuple(Message(message.role, message.content) for message in self.messages or ())
        name = f"prompt-{number}" if self.id is None else self.id
        return Prompt(name, self.prompt, messages, self.reference, self.task)


def _read(path: Path) -> bytes:
    try:
        return read_document(path, limit=LARGEST_PROMPT_FILE, error=WorkloadError)
    except FileNotFoundError:
        names = ", ".join(BUILT_IN)
        raise WorkloadError(
            f"expected a prompt file or one of {names}, got {str(path)!r}, which does not exist"
        ) from None
    except IsADirectoryError:
        raise WorkloadError(f"expected a prompt file, got the directory {path}: name a file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkloadError(f"expected a readable prompt file, got {str(path)!r}: {reason}") from error


def _decode(data: bytes, name: str) -> str:
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise WorkloadError(
            f"{name}, line {line}: expected UTF-8, got the byte 0x{byte:02x}: save the file as UTF-8"
        ) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # not splitlines(): that also cuts at separators that JSON allows inside strings
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def _parse_plain_text(text: str) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"prompt-{count}", line.strip()) for count, (_, line) in enumerate(_lines(text), 1))


def _parse_json_lines(text: str, name: str) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    lines_by_id: dict[str, int] = {}
    for number, line in _lines(text):
        where = f"{name}, line {number}"
        prompt = _parse_line(line, where).to_prompt(len(prompts) + 1)
        if prompt.id in lines_by_id:
            first = lines_by_id[prompt.id]
            raise WorkloadError(f"{where}: expected a new id, got {prompt.id!r}, which line {first} has")
        lines_by_id[prompt.id] = number
        prompts.append(prompt)
    return tuple(prompts)


def _parse_line(line: str, where: str) -> _PromptLine:
    if len(line) > LARGEST_DOCUMENT:
        raise WorkloadError(f"{where}: expected at most {LARGEST_DOCUMENT // 2**20} MiB in a line, got more")
    try:
        value = parse_json(line, "the line", error=WorkloadError)
    except WorkloadError as error:
        raise WorkloadError(
            f"{where}: expected one JSON object, got none ({error}); plain text belongs in a .txt file"
        ) from None
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: expected a JSON object with prompt or messages, got {_shorten(line)}")
    return _validated(value, where)


def _validated(value: Mapping[str, Any], where: str) -> _PromptLine:
    try:
        return _PromptLine.model_validate(value)
    except ValidationError as error:
        raise WorkloadError(f"{where}: {_first_reason(error)}") from None


_EXPECTED = {"string_type": "a string", "list_type": "a list", "model_type": "an object"}


def _first_reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if cause is not None:
        return str(cause)
    field = _describe(first["loc"])
    if first["type"] == "missing":
        return f"expected {field}, got none"
    reason = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should be "))
    return f"expected {field} to be {reason}, got {excerpt(first['input'], limit=40)}"


def _describe(location: tuple[int | str, ...]) -> str:
    """Return the words for a place in a line: ("messages", 0, "role") is "the role of message 1"."""
    match location:
        case ("messages", int(index)):
            return f"message {index + 1}"
        case ("messages", int(index), key):
            return f"the {key} of message {index + 1}"
        case _:
            return " ".join(map(str, location))


def _shorten(text: str, *, limit: int = 40) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _turns_in_task(prompts: Sequence[Prompt]) -> list[int]:
    seen: dict[str, int] = {}
    turns = []
    for prompt in prompts:
        turns.append(seen.get(prompt.task, 0))
        seen[prompt.task] = turns[-1] + 1
    return turns


def _plain(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    lines = [f"{message.role}: {message.content}" for message in prompt.messages]
    return "\n".join([*lines, "assistant:"])


def _apply_chat_template(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    conversation = [{"role": message.role, "content": message.content} for message in prompt.conversation]
    try:
        return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise WorkloadError(
            f"expected the tokenizer's chat template to take prompt {prompt.id!r}, got {type(error).__name__}: {reason}"
        ) from error
