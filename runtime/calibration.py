"""Calibration data: what the target writes, batch by batch, with its own choice at every place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hsdopt.errors import InvalidArgumentError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from hsdopt.runtime.model import Model

    Progress = Callable[[str, int, int], None]

T = TypeVar("T")
Kind = Literal["greedy", "sampled", "span", "prompt"]

__all__ = ["Batch", "Calibration", "Example", "Records", "Turn", "batches", "calibrate", "split"]

_SPAN = (16, 64)
"""Tokens of a span that is continued: at least, and at most."""
_PROMPT_TOKENS = 64
"""Tokens of a prompt that the target writes itself, at most; one that is not complete by then is not used."""
_PROMPT_TEMPERATURE = 1.0
IGNORED = -100
"""The label of a token that does not count, as PyTorch's cross-entropy has it."""


class Records(Protocol):
    """A list that outlives the process: the journal of a measurement, for one."""

    records: list[dict[str, Any]]

    def add(self, **record: Any) -> None:  # noqa: ANN401 -- any JSON value
        """Append one record for good."""

    def read(self, make: Callable[[dict[str, Any]], T], *, holding: str = "") -> list[T]:
        """Return what `make` makes of every record, of those that have the field `holding` if one is named."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One sequence that the target continued.

    Attributes
    ----------
    group : int
        The number of the prompt that it came from; what is held out is held out by prompt.
    tokens : tuple of int
        Prompt and output.
    start : int
        Tokens of the prompt: those from `start` on are the target's.
    best : tuple of int
        The target's most probable token at every place of the output; its tokens themselves, if it wrote greedily.
    kind : {"greedy", "sampled", "span", "prompt"}
        How it was written: after a whole prompt, greedily after a span of some text, or as a prompt, after the opening
        of the user's turn.
    top : pair of arrays or None
        Ids and log probabilities [outputs, k] of the target's k most probable tokens.
    """

    group: int
    tokens: tuple[int, ...]
    start: int
    best: tuple[int, ...]
    kind: Kind = "greedy"
    top: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None

    @property
    def outputs(self) -> int:
        """How many tokens the target wrote."""
        return len(self.best)


@dataclass(frozen=True, slots=True)
class Turn:
    """What stands around every request, whatever it says.

    Attributes
    ----------
    opening, closing : tuple of int
        Tokens before the request and after it, up to where the target answers.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is to be written.

    Attributes
    ----------
    samples : int
        Outputs per given prompt: the first greedy, the others sampled.
    temperature : float
        Of the sampled ones.
    spans : int
        Greedy continuations per given prompt of random spans of prompts and outputs, as plain text.
    own_prompts : int
        Prompts that the target writes itself, sampled after the opening of a user's turn: text that it was trained to
        expect, without a data set (Xu et al. 2024, Magpie). Each gets one greedy output, but for those that repeat
        another or do not end.
    max_new_tokens : int
        Tokens per output.
    batch : int
        Prompts written together.
    top : int
        Probabilities kept per token, for soft labels; 0 keeps none.
    seed : int
        Of samples and spans.
    """

    samples: int = 1
    temperature: float = 0.0
    spans: int = 0
    own_prompts: int = 0
    max_new_tokens: int = 64
    batch: int = 8
    top: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse samples that would all be alike."""
        if self.samples > 1 and not self.temperature > 0:
            raise InvalidArgumentError(
                f"expected a temperature above 0 for {self.samples} samples per prompt; got {self.temperature:g}:"
                " greedy outputs are all alike"
            )
        if min(self.samples, self.max_new_tokens, self.batch) < 1 or min(self.spans, self.own_prompts, self.top) < 0:
            raise InvalidArgumentError("expected at least 1 sample, 1 new token and 1 prompt a batch; got fewer")


@dataclass(frozen=True, slots=True)
class _Job:
    group: int
    prompt: tuple[int, ...]
    kind: Kind
    ends: frozenset[int]


def calibrate(
    target: Model,
    prompts: Sequence[Sequence[int]],
    wanted: Calibration,
    *,
    turn: Turn | None = None,
    journal: Records | None = None,
    progress: Progress | None = None,
) -> list[Example]:
    """Return what `target` writes after every prompt, and what it would have chosen at each place.

    Every output is a record of `journal` at once; outputs whose record is there already are not written again, and
    the others come out as they would have in one go.

    Parameters
    ----------
    target : Model
        A decoder-only network.
    prompts : sequence of sequences of int
        Token ids.
    wanted : Calibration
        How many outputs, and of what kind.
    turn : Turn, optional
        What stands around a request; needed for prompts of the target's own.
    journal : Records, optional
        Where outputs are kept; must belong to the same target, prompts and options.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    ModelError
        If the target is an encoder-decoder or a lookup drafter.
    InvalidArgumentError
        If there are no prompts, or one leaves no room for the output.
    """
    _check(target, prompts, wanted, turn)
    done = [] if journal is None else journal.read(_example)
    total = 2 * wanted.own_prompts + len(prompts) * (wanted.samples + wanted.spans)
    writer = _Writer(target, wanted, done, journal, lambda count: progress and progress("calibrating", count, total))
    own: dict[int, tuple[int, ...]] = {}
    if turn is not None and wanted.own_prompts:
        ends = target.eos | set(turn.closing[:1])
        writer.write([_Job(len(prompts) + n, turn.opening, "prompt", ends) for n in range(wanted.own_prompts)])
        own = _own_prompts(done[: wanted.own_prompts], turn, ends)
    kinds: list[Kind] = ["greedy", *["sampled"] * (wanted.samples - 1)]  # type: ignore[list-item] # a literal, times n
    jobs = [_Job(group, tuple(prompt), kind, target.eos) for kind in kinds for group, prompt in enumerate(prompts)]
    jobs += [_Job(group, prompt, "greedy", target.eos) for group, prompt in own.items()]
    writer.write(sorted(jobs, key=lambda job: (job.kind, len(job.prompt))))  # alike in length: little is padding
    given = [example for example in done[: writer.asked] if example.group < len(prompts)]
    spans = _spans(given, wanted, target)
    writer.write(sorted(spans, key=lambda job: len(job.prompt)))
    if progress is not None:
        progress("calibrating", total, total)  # short outputs make fewer spans and prompts than were asked for
    return done


def _check(target: Model, prompts: Sequence[Sequence[int]], wanted: Calibration, turn: Turn | None) -> None:
    if target.network is None or target.start is not None:
        raise ModelError(f"expected a decoder-only network as the target of an alignment; got {target.source}")
    if not prompts:
        raise InvalidArgumentError("expected at least one prompt to calibrate on; got none")
    if wanted.own_prompts and (turn is None or not turn.opening):
        raise InvalidArgumentError(
            f"expected a chat template or a first token, after which {target.name} could write prompts of its own;"
            " its tokenizer has neither: leave --own-prompts out"
        )
    longest = max(map(len, prompts))
    if turn is not None and wanted.own_prompts:
        longest = max(longest, len(turn.opening) + _PROMPT_TOKENS + len(turn.closing))
    longest += wanted.max_new_tokens
    if target.max_positions is not None and longest > target.max_positions:
        raise InvalidArgumentError(
            f"expected prompts and outputs within the {target.max_positions} positions of {target.name}; got {longest}:"
            " lower --max-new-tokens or shorten the prompts"
        )


@dataclass
class _Writer:
    """Writes jobs in fixed batches; a batch with records missing is written again, and only those are added."""

    target: Model
    wanted: Calibration
    done: list[Example]
    journal: Records | None
    report: Callable[[int], object]
    asked: int = 0

    def write(self, jobs: list[_Job]) -> None:
        for kind in dict.fromkeys(job.kind for job in jobs):
            alike = [job for job in jobs if job.kind == kind]
            for first in range(0, len(alike), self.wanted.batch):
                chunk = alike[first : first + self.wanted.batch]
                have = len(self.done) - self.asked
                self.asked += len(chunk)
                if have < len(chunk):
                    self._write(chunk, max(have, 0))
                    self.report(len(self.done))

    def _write(self, chunk: list[_Job], have: int) -> None:
        for record in _outputs(self.target, chunk, self.wanted, self.asked)[have:]:
            if self.journal is not None:
                self.journal.add(**record)
            self.done.append(_example(record))


def _own_prompts(written: list[Example], turn: Turn, ends: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Return whole prompts, by group, of what the target wrote in the user's turn."""
    prompts: dict[tuple[int, ...], int] = {}
    for example in written:
        words = example.tokens[example.start :]
        ended = words[-1] in ends
        request = words[:-1] if ended else words
        if request and (ended or not turn.closing):
            prompts.setdefault((*turn.opening, *request, *turn.closing), example.group)
    return {group: prompt for prompt, group in prompts.items()}


def _spans(examples: list[Example], wanted: Calibration, target: Model) -> list[_Job]:
    """Draw spans of the texts written so far; a span belongs to the prompt of its text."""
    rng = np.random.default_rng([wanted.seed, len(examples)])
    texts: dict[int, list[Example]] = {}
    for example in examples:
        texts.setdefault(example.group, []).append(example)
    least, most = _SPAN
    if target.max_positions is not None:
        most = min(most, target.max_positions - wanted.max_new_tokens)
    jobs = []
    for group, own in sorted(texts.items()):
        for _ in range(wanted.spans):
            tokens = own[rng.integers(len(own))].tokens
            length = min(int(rng.integers(min(least, most), most + 1)), len(tokens))
            first = int(rng.integers(len(tokens) - length + 1))
            jobs.append(_Job(group, tokens[first : first + length], "span", target.eos))
    return jobs


class _Recorder(LogitsProcessor):  # type: ignore[misc] # transformers is not typed
    """Notes the target's choice and its probabilities at every step; keeps padded ids from being chosen."""

    def __init__(self, vocab_size: int, top: int, temperature: float) -> None:
        self.vocab_size = vocab_size
        self.top = top
        self.temperature = temperature
        self.best: list[torch.Tensor] = []
        self.tops: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Take and return scores [batch, vocab]."""
        scores = scores.clone()
        scores[:, self.vocab_size :] = -torch.inf
        self.best.append(scores.argmax(-1).cpu())
        if self.top:
            values, ids = scores.float().log_softmax(-1).topk(min(self.top, self.vocab_size))
            self.tops.append((ids.cpu(), values.cpu()))
        return scores / self.temperature if self.temperature else scores


def _outputs(target: Model, chunk: list[_Job], wanted: Calibration, number: int) -> list[dict[str, Any]]:
    """Return the records of a batch; the seed is the batch's own, so that any batch can be written alone."""
    network = target.network
    assert network is not None  # noqa: S101 -- checked with the prompts
    temperature = {"sampled": wanted.temperature, "prompt": _PROMPT_TEMPERATURE}.get(chunk[0].kind, 0.0)
    ids, mask = _left_padded([job.prompt for job in chunk], network.device)
    recorder = _Recorder(target.vocab_size, wanted.top, temperature)
    ends = sorted(chunk[0].ends)
    options = GenerationConfig(
        do_sample=temperature > 0,
        num_beams=1,
        temperature=1.0,  # the recorder's; every option of the model's own is overridden
        **({"top_k": 0, "top_p": 1.0} if temperature else {}),
        repetition_penalty=1.0,
        max_new_tokens=_PROMPT_TOKENS if chunk[0].kind == "prompt" else wanted.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    devices = [network.device] if network.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        torch.manual_seed((wanted.seed << 32) + number)
        written = network.generate(
            ids, attention_mask=mask, generation_config=options, logits_processor=LogitsProcessorList([recorder])
        )
    fresh = written[:, ids.shape[1] :].tolist()
    return [_record(job, row, index, recorder) for index, (job, row) in enumerate(zip(chunk, fresh, strict=True))]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def _record(job: _Job, row: list[int], index: int, recorder: _Recorder) -> dict[str, Any]:
    length = next((place + 1 for place, token in enumerate(row) if token in job.ends), len(row))
    record: dict[str, Any] = {
        "group": job.group,
        "start": len(job.prompt),
        "tokens": [*job.prompt, *row[:length]],
        "best": [int(step[index]) for step in recorder.best[:length]],
        "kind": job.kind,
    }
    if recorder.top:
        record["top"] = [ids[index].tolist() for ids, _ in recorder.tops[:length]]
        record["log"] = [[round(v, 4) for v in values[index].tolist()] for _, values in recorder.tops[:length]]
    return record


def _example(record: dict[str, Any]) -> Example:
    top = (np.array(record["top"]), np.array(record["log"])) if "top" in record else None
    tokens, best = tuple(record["tokens"]), tuple(record["best"])
    return Example(record["group"], tokens, record["start"], best, record["kind"], top)


def split(examples: Sequence[Example], *, share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples: a share of the prompts is held out, with all that came from them.

    Raises
    ------
    InvalidArgumentError
        If there are fewer than two prompts, or the share is not between 0 and 1.

    Examples
    --------
    >>> examples = [Example(group, (5, 6), 1, (6,)) for group in (0, 0, 1, 2, 3)]
    >>> train, held_out = split(examples, share=0.25, seed=0)
    >>> len({e.group for e in held_out}), {e.group for e in train} & {e.group for e in held_out}
    (1, set())
    """
    if not 0 < share < 1:
        raise InvalidArgumentError(f"expected a share between 0 and 1 to hold out; got {share:g}")
    groups = sorted({example.group for example in examples})
    if len(groups) < 2:
        raise InvalidArgumentError(f"expected at least 2 prompts, one to train on and one held out; got {len(groups)}")
    count = min(max(1, round(share * len(groups))), len(groups) - 1)
    chosen = set(np.random.default_rng([seed, 7]).permutation(groups)[:count].tolist())
    return [e for e in examples if e.group not in chosen], [e for e in examples if e.group in chosen]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences padded on the right, and what is asked about them.

    Attributes
    ----------
    ids : Tensor [batch, length]
        Token ids.
    mask : Tensor [batch, length] of bool
        Places whose next token is the target's; n in all, in the order of rows.
    outputs, best : Tensor [n]
        The target's tokens at these places, and its most probable ones.
    top : pair of Tensor [n, k] or None
        Ids and log probabilities of its k most probable ones.
    counts : tuple of int
        Places of each sequence.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    outputs: torch.Tensor
    best: torch.Tensor
    top: tuple[torch.Tensor, torch.Tensor] | None
    counts: tuple[int, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> Batch:
        """Collate examples; no attention mask is needed, because causal networks never look to the right."""
        width = max(len(example.tokens) for example in examples)
        ids = torch.tensor([[*e.tokens, *[0] * (width - len(e.tokens))] for e in examples], device=device)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, example in enumerate(examples):
            mask[row, example.start - 1 : len(example.tokens) - 1] = True
        outputs = torch.tensor([t for e in examples for t in e.tokens[e.start :]], device=device)
        best = torch.tensor([t for e in examples for t in e.best], device=device)
        return cls(ids, mask.to(device), outputs, best, _tops(examples, device), tuple(e.outputs for e in examples))


def _tops(examples: Sequence[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    tops = [example.top for example in examples if example.top is not None]
    if len(tops) < len(examples):
        return None
    ids, values = (np.concatenate([top[part] for top in tops]) for part in (0, 1))
    return torch.from_numpy(ids).to(device), torch.from_numpy(values).to(device)


def batches(examples: Sequence[Example], size: int, *, seed: int, step: int) -> list[Example]:
    """Return the examples of the batch at `step`, a function of the seed and the step alone.

    Every epoch visits all examples in a new order; sequences of a batch are alike in length, so that little is padding.

    Examples
    --------
    >>> examples = [Example(0, (5,) * length, 1, (5,) * (length - 1)) for length in range(2, 8)]
    >>> epoch = [example for step in range(3) for example in batches(examples, 2, seed=0, step=step)]
    >>> sorted(len(example.tokens) for example in epoch)
    [2, 3, 4, 5, 6, 7]
    """
    per_epoch = -(-len(examples) // size)
    epoch, place = divmod(step, per_epoch)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(examples)).tolist()
    pool = 8 * size
    pools = [sorted(order[i : i + pool], key=lambda n: len(examples[n].tokens)) for i in range(0, len(order), pool)]
    flat = [number for part in pools for number in part]
    first = int(rng.permutation(per_epoch)[place]) * size
    return [examples[number] for number in flat[first : first + size]]
