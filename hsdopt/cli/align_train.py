"""How `hsdopt align` trains: the target's outputs, what starts from it, training, and what is saved."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hsdopt.cli.align_saved import Saved, Start, kept_of_target
from hsdopt.cli.common import output_folder, progress_bar
from hsdopt.cli.faults import resumable
from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hsdopt.cli.align_request import Folder, Request
    from hsdopt.profiling import Workload
    from hsdopt.profiling.journal import Journal
    from hsdopt.runtime import Model
    from hsdopt.runtime.calibration import Example, Progress
    from hsdopt.runtime.students import Students

__all__ = ["train_and_save"]

_JOINT = "A copy of the target, trained with its exits: it is a target of its own, and exit:E@FOLDER drafts for it."


def train_and_save(
    request: Request,
    place: Folder,
    workload: Workload,
    loading: dict[str, Any],
    *,
    compact: bool,
) -> dict[str, Any]:
    """Write calibration data, train, and save; return what is shown."""
    from hsdopt.profiling.journal import Journal
    from hsdopt.runtime import load_models
    from hsdopt.runtime.alignment import align as train
    from hsdopt.runtime.calibration import split

    sources = {"target": request.target, **({} if request.small is None else {"small": request.small})}
    models = load_models(sources, **loading)
    dtype = models["target"].dtype
    for model in models.values():
        _prepare(model)
    _check(request, models, workload)
    header = {"workload": workload.sha256, **asdict(request), "compact": compact}
    journal = Journal(place.journal, header, resume=place.resume)
    with resumable(place.journal), progress_bar() as report:
        examples = _calibrate(request, place, workload, models["target"], report)
        examples_, held_out = split(examples, share=request.holdout, seed=request.recipe.seed)
        chosen = _some(examples_, request.choice_tokens, given=len(workload))
        students, start = _students(request, models, examples_, chosen, journal, report)
        outcome = train(
            students, examples_, held_out, request.recipe, folder=place.partial, resume=place.resume, progress=report
        )
        saved = Saved(request, place, workload, models["target"], outcome, start, compact)
        return saved.write(students, dtype, examples_)


def _check(request: Request, models: dict[str, Model], workload: Workload) -> None:
    """Refuse what cannot be trained before the target has written for hours."""
    from hsdopt.runtime.calibration import Example, split
    from hsdopt.runtime.heads import frequent_tokens
    from hsdopt.runtime.layer_choice import check_layers
    from hsdopt.runtime.quantised import decoder_layers
    from hsdopt.runtime.students import check_exits

    target = models["target"]
    network = models.get("small", target).network
    split([Example(group, (), 0, ()) for group in range(len(workload))], share=request.holdout, seed=0)
    if request.layers is not None:
        check_layers(network, request.layers)
    if request.exits is not None:
        check_exits(request.exits, decoder_layers(network), least=request.own_layers or 1)
    if request.head_tokens is not None:
        frequent_tokens([], request.head_tokens, vocab_size=target.vocab_size, ends=target.eos)


def _prepare(model: Model) -> None:
    """Give a network its whole head, and let half-precision weights be trained in float32.

    A GPU still computes in bfloat16.
    """
    import torch

    from hsdopt.runtime.heads import whole_head

    if model.network is None:
        raise InvalidArgumentError(f"expected a network to align; {model.source} only proposes")
    if model.precision in ("int8", "int4"):
        raise InvalidArgumentError(
            f"expected weights that can be trained; those of {model.source} are {model.precision}"
        )
    whole_head(model.network)
    if model.dtype in (torch.bfloat16, torch.float16):
        model.network.float()


def _calibrate(
    request: Request,
    place: Folder,
    workload: Workload,
    target: Model,
    report: Progress,
) -> list[Example]:
    from hsdopt.profiling import render_prompts, turn
    from hsdopt.profiling.journal import Journal
    from hsdopt.runtime.calibration import Turn, calibrate

    path = place.data or place.partial / "calibration.jsonl"
    output_folder(path.parent)
    header = {"target": request.target, "workload": workload.sha256, **asdict(request.calibration)}
    journal = Journal(path, header, resume=True)
    prompts = list(render_prompts(workload, target).values())
    around = None
    if request.calibration.own_prompts and target.tokenizer is not None:
        around = Turn(*turn(target.tokenizer))
    return calibrate(target, prompts, request.calibration, turn=around, journal=journal, progress=report)


def _students(
    request: Request,
    models: dict[str, Model],
    examples: list[Example],
    chosen: list[Example],
    journal: Journal,
    report: Progress,
) -> tuple[Students, Start]:
    """Return what is to be trained, and where it starts; layers are chosen on the examples `chosen`."""
    from hsdopt.runtime.heads import frequent_tokens, shrink_head
    from hsdopt.runtime.students import drafter, frozen_exits, joint_exits

    target = models["target"]
    network = models.get("small", target).network
    head = None
    if request.head_tokens is not None:
        head = frequent_tokens(examples, request.head_tokens, vocab_size=target.vocab_size, ends=target.eos)
    if request.exits is not None:
        if request.own_layers is None:
            return joint_exits(network, request.exits, embeddings=request.embeddings), Start(_JOINT)
        made = frozen_exits(network, request.exits, own=request.own_layers, examples=chosen, head_tokens=head)
        text = f"The target's lower layers, frozen; the last {request.own_layers} and the norm are its own."
        return made, Start(text)
    skipped, start = _skipped(request, network, chosen, journal, report)
    students = drafter(network, skipped=skipped, embeddings=request.embeddings)
    if head is not None:
        shrink_head(students.parts[0].network, head)
        start = replace(start, text=f"{start.text} Its head is cut down to {len(head)} tokens.")
    return students, start


def _skipped(
    request: Request,
    network: PreTrainedModel,
    chosen: list[Example],
    journal: Journal,
    report: Progress,
) -> tuple[tuple[int, ...], Start]:
    """Return the layers to leave out of `network`, and what that makes of it."""
    from hsdopt.runtime.layer_choice import choose_layers
    from hsdopt.runtime.quantised import decoder_layers

    base = request.target if request.small is None else request.small
    count = decoder_layers(network)
    if request.layers is None:
        return (), Start(f"All layers of {base}.", kept_of_target(request, tuple(range(count))))
    skipped = choose_layers(
        network, chosen, layers=request.layers, group=request.drop_group, journal=journal, progress=report
    )
    kept = tuple(layer for layer in range(count) if layer not in skipped)
    left = ", ".join(str(layer) for layer in kept)
    tokens = sum(example.outputs for example in chosen)
    text = (
        f"{request.layers} of the {count} layers of {base}: {left}, left by dropping, one by one, those without which"
        f" the target's choice was met most often on {tokens} tokens."
    )
    return skipped, Start(text, kept_of_target(request, kept))


def _some(examples: list[Example], tokens: int, *, given: int) -> list[Example]:
    """Return greedy examples of about so many tokens, spread over the given prompts.

    They are what the drafter is for; prompts of the target's own are but more text to train on.
    """
    greedy = [example for example in examples if example.kind == "greedy"]
    asked = [example for example in greedy if example.group < given] or greedy
    return asked[:: max(1, sum(example.outputs for example in asked) // tokens)]
