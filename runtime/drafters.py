"""Folders of trained drafters: what they hold beside a plain model folder, and how they are loaded.

hsdopt.json, beside the weights, may say two things: ``head_tokens``, the ids that the head is cut down to, and
``shared``, tensors that are those of another model, which a compact folder leaves out.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from hsdopt.errors import HsdoptError, ModelError
from hsdopt.files import excerpt, read_json
from hsdopt.runtime.builtin import quiet
from hsdopt.runtime.heads import SubsetHead, shrink_head

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hsdopt.runtime.alignment import Agreement, Outcome

__all__ = ["model_card", "read_note", "restored", "save_drafter", "shared_tensors"]

_NOTE = "hsdopt.json"
_WEIGHTS = "model.safetensors"


def save_drafter(
    folder: Path,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    target: PreTrainedModel,
    source: str,
    dtype: torch.dtype | None = None,
    compact: bool = False,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write a folder that `from_pretrained` and `load_models` take, whole or not at all; return it.

    Parameters
    ----------
    folder : Path
        Must not exist.
    network : PreTrainedModel
        The drafter; a small head becomes rows of the whole one, and its ids stand in hsdopt.json.
    tokenizer : PreTrainedTokenizerBase or None
        Saved beside it.
    target : PreTrainedModel
        What it may share tensors with.
    source : str
        What the target is loaded from.
    dtype : torch.dtype, optional
        The type of the stored weights, if not that of the network's.
    compact : bool
        Leave out the shared tensors: `load_models` takes them from the target, `from_pretrained` cannot.
    files : mapping of str to str or bytes, optional
        More files, by name.

    Raises
    ------
    HsdoptError
        If it cannot be written.
    """
    shared = shared_tensors(network, target)
    note: dict[str, Any] = {"shared": {"source": source, "tensors": shared, "left_out": compact}}
    head = network.get_output_embeddings()
    if isinstance(head, SubsetHead):
        note["head_tokens"] = head.ids.tolist()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.part-") as scratch:
            made = Path(scratch) / "model"
            with quiet():
                _whole(network).to(dtype or network.dtype).save_pretrained(made)
            if compact:
                _leave_out(made, shared)
            if tokenizer is not None:
                tokenizer.save_pretrained(made)
            for name, content in {**(files or {}), _NOTE: json.dumps(note) + "\n"}.items():
                (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
            made.replace(folder)
    except (OSError, safetensors.SafetensorError) as error:
        said = getattr(error, "strerror", None) or error
        raise HsdoptError(f"cannot write {folder}: {said}; make room and continue with --resume") from error
    return folder


def shared_tensors(network: PreTrainedModel, target: PreTrainedModel) -> list[str]:
    """Return the names of weights of `network` that are the target's own tensors, under the same names."""
    places = {name: weight.data_ptr() for name, weight in target.named_parameters()}
    return [name for name, weight in network.named_parameters() if places.get(name) == weight.data_ptr()]


def _whole(network: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with a whole head, whose weights nothing else uses."""
    made = copy.deepcopy(network)
    head = made.get_output_embeddings()
    if isinstance(head, SubsetHead):
        whole = head.whole
        if head.inner.weight.requires_grad:  # its rows have moved away from the embeddings they may have been
            whole = copy.deepcopy(whole)
            made.config.tie_word_embeddings = False
            _write_rows(whole, head)
        made.set_output_embeddings(whole)
    return made


def _write_rows(whole: nn.Module, head: SubsetHead) -> None:
    with torch.no_grad():
        for name, weight in whole.named_parameters():
            weight[head.ids] = getattr(head.inner, name)


def _leave_out(folder: Path, names: list[str]) -> None:
    """Drop tensors from a saved folder; a folder of several files keeps them, which does no harm."""
    path = folder / _WEIGHTS
    if not path.exists():
        return
    kept = {name: tensor for name, tensor in safetensors.torch.load_file(path).items() if name not in set(names)}
    safetensors.torch.save_file(kept, path, metadata={"format": "pt"})


class _Shared(BaseModel):
    model_config = ConfigDict(strict=True)

    source: str
    tensors: list[str]
    left_out: bool = False


class _Note(BaseModel):
    """What is read of hsdopt.json; keys not named here are for people."""

    model_config = ConfigDict(strict=True)

    shared: _Shared | None = None
    head_tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None


def read_note(folder: Path) -> dict[str, Any]:
    """Return what hsdopt.json in a model folder says; nothing if there is none.

    Raises
    ------
    ModelError
        If it cannot be read.
    """
    path = folder / _NOTE
    if not path.is_file():
        return {}
    try:
        note = read_json(path, error=ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; align the drafter again") from error
    except OSError as error:
        raise ModelError(f"expected a JSON object in {path}; {error}: align the drafter again") from error
    if not isinstance(note, dict):
        raise ModelError(f"expected a JSON object in {path}; got {type(note).__name__}: align the drafter again")
    try:
        _Note.model_validate(note)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ModelError(
            f"expected {place} in {path} as hsdopt align writes it; got {excerpt(first['input'])}: "
            "align the drafter again"
        ) from None
    return note


def restored(network: PreTrainedModel, note: Mapping[str, Any], load: Callable[[str], Any]) -> PreTrainedModel:
    """Return a network just loaded as its folder's note completes it: left-out tensors, and a small head.

    Parameters
    ----------
    network : PreTrainedModel
        Changed in place.
    note : mapping
        Of `read_note`.
    load : callable
        Returns the network of a source; called only if tensors were left out.

    Raises
    ------
    ModelError
        If the source lacks a tensor that was left out.
    """
    shared = note.get("shared") or {}
    if shared.get("left_out"):
        _take(network, load(shared["source"]), shared["tensors"], shared["source"])
    if note.get("head_tokens") is not None:
        known = network.get_output_embeddings().weight.shape[0]
        if max(note["head_tokens"]) >= known:
            raise ModelError(f"expected head_tokens below {known} in {_NOTE}; got more: align the drafter again")
        head = shrink_head(network, note["head_tokens"]).get_output_embeddings()
        if head.whole.weight is not network.get_input_embeddings().weight:
            head.forget()
    return network


def _take(network: PreTrainedModel, owner: PreTrainedModel, names: list[str], source: str) -> None:
    own, theirs = dict(network.named_parameters()), dict(owner.named_parameters())
    for name in names:
        if name not in own or name not in theirs or own[name].shape != theirs[name].shape:
            raise ModelError(f"expected {name} in {source}, which a compact drafter shares; it has none of that shape")
        weight = theirs[name].detach()
        alike = weight.dtype == own[name].dtype and weight.device == own[name].device
        own[name].data = weight if alike else weight.to(own[name].device, own[name].dtype)


def model_card(
    names: Sequence[str],
    outcome: Outcome,
    *,
    target: str,
    source: str,
    start: str,
    data: str,
    recipe: Mapping[str, object],
) -> str:
    """Return the README.md of a drafter: what it was trained on, how, for how long, and what came of it.

    Parameters
    ----------
    names : sequence of str
        Of the students in the folder, as in `outcome`.
    outcome : Outcome
        Of its training.
    target, source : str
        What it drafts for, and what it is loaded as.
    start, data : str
        What it started as, and what it was trained on; a sentence each.
    recipe : mapping
        Options of the training, listed as they are.
    """
    listed = "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in recipe.items() if value is not None)
    rows = "\n".join(
        _card_row(name, when, found[name])
        for name in names
        for when, found in (("before", outcome.before), ("after", outcome.after))
    )
    ends = {"steps": "all steps were made", "patience": "the held-out acceptance rose no more", "time": "time was up"}
    return f"""# A drafter for {target}

Load it as `{source}`: `hsdopt profile --target {target} --draft {source} ...`

## Start
{start}

## Data
{data}

## Recipe
{listed}

{outcome.steps} steps over {outcome.tokens} target tokens took {outcome.seconds:.0f} s; {ends[outcome.stopped]}. The
weights are those of step {outcome.best_step}, the best on held-out prompts.

## Held-out acceptance
Share of places where its choice is the target's, on prompts that it was not trained on; 95 % interval by bootstrap
over sequences. The kept step was chosen on these prompts too: expect a little less elsewhere.

| | training | acceptance | interval | accepted | places |
|---|---|---|---|---|---|
{rows}
"""


def _card_row(name: str, when: str, found: Agreement) -> str:
    interval = f"{found.low:.3f} to {found.high:.3f}"
    return f"| {name} | {when} | {found.rate:.3f} | {interval} | {found.accepted} | {found.places} |"
