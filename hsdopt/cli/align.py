"""`hsdopt align`: train drafters on what the target writes."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import (
    absolute,
    new_table,
    output,
    output_folder,
    print_json,
    progress_bar,
    require_extra,
    status,
    whole_numbers,
)
from hsdopt.cli.faults import resumable
from hsdopt.errors import HsdoptError, InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hsdopt.profiling import Workload
    from hsdopt.profiling.journal import Journal
    from hsdopt.runtime import Model
    from hsdopt.runtime.alignment import Agreement, Outcome, Recipe
    from hsdopt.runtime.calibration import Calibration, Example, Progress
    from hsdopt.runtime.students import Students

_JOINT = "A copy of the target, trained with its exits: it is a target of its own, and exit:E@FOLDER drafts for it."
_TOGETHER = 32
"""Prompts that the target continues together."""
_TOP = 16
"""Probabilities kept per token for soft labels."""

Target = Annotated[str, typer.Option("--target", help="The model to draft for.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="The folder that the drafter is written to.")]
Prompts = Annotated[str, typer.Option("--prompts", help="training, another built-in set, or a file of prompts.")]
Small = Annotated[str | None, typer.Option("--small", help="A smaller model to start from; the target if not given.")]
Layers = Annotated[
    int | None, typer.Option("--layers", min=1, help="Keep so many layers: those that acceptance needs most.")
]
Exits = Annotated[str | None, typer.Option("--exits", help="Train exits after so many layers, such as 10,20.")]
Freeze = Annotated[bool, typer.Option("--freeze-target", help="With --exits: train only what the exits own.")]
Own = Annotated[int, typer.Option("--own-layers", min=1, help="With --freeze-target: layers that each exit owns.")]
Head = Annotated[
    int | None, typer.Option("--head-tokens", min=1, help="Propose only so many tokens, the most frequent ones.")
]
Embeddings = Annotated[
    bool | None,
    typer.Option(
        "--train-embeddings/--freeze-embeddings", help="Train embeddings and head; frozen unless --small is whole."
    ),
]
Soft = Annotated[float, typer.Option("--soft", min=0.0, help="Weight of the target's distribution as soft labels.")]
Labels = Annotated[str, typer.Option("--labels", help="argmax, or outputs: in sampled outputs they differ.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Outputs per prompt; the first one is greedy.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="Of the sampled outputs.")]
Spans = Annotated[int, typer.Option("--spans", min=0, help="Random spans per prompt that the target continues too.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens per output.")]
Count = Annotated[int | None, typer.Option("--max-prompts", min=2, help="Use at most this many prompts.")]
Data = Annotated[
    Path | None, typer.Option("--calibration", help="File that keeps the target's outputs, for other drafters to use.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps of training at most.")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="Time for training, in place of --steps.")]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Sequences per step.")]
Rate = Annotated[float, typer.Option("--learning-rate", help="At its highest.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Steps until then.")]
Every = Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between looks at held-out prompts.")]
Patience = Annotated[int, typer.Option("--patience", min=1, help="Looks without a new best before it stops.")]
Holdout = Annotated[float, typer.Option("--holdout", help="Share of prompts held out.")]
Group = Annotated[int, typer.Option("--drop-group", min=1, help="Layers dropped between two rounds of choice.")]
ChoiceTokens = Annotated[int, typer.Option("--choice-tokens", min=1, help="Target tokens that layers are chosen on.")]
Compact = Annotated[
    bool, typer.Option("--compact", help="Do not store the target's own tensors again; only hsdopt can load it then.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of samples, order and held-out prompts.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted alignment.")]
Force = Annotated[bool, typer.Option("--force", help="Start afresh, and replace what is at -o.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def align(
    target: Target,
    output_path: Out,
    prompts: Prompts = "training",
    small: Small = None,
    layers: Layers = None,
    exits: Exits = None,
    freeze_target: Freeze = False,
    own_layers: Own = 1,
    head_tokens: Head = None,
    train_embeddings: Embeddings = None,
    soft: Soft = 0.0,
    labels: Labels = "argmax",
    samples: Samples = 1,
    temperature: Temperature = 0.8,
    spans: Spans = 0,
    max_new_tokens: NewTokens = 64,
    max_prompts: Count = None,
    calibration: Data = None,
    steps: Steps = 1000,
    minutes: Minutes = None,
    batch: BatchSize = 8,
    learning_rate: Rate = 5e-4,
    warmup: Warmup = 20,
    evaluate_every: Every = 50,
    patience: Patience = 10,
    holdout: Holdout = 0.15,
    drop_group: Group = 1,
    choice_tokens: ChoiceTokens = 512,
    compact: Compact = False,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
    resume: Resume = False,
    force: Force = False,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Train a drafter on what the target writes, so that the target accepts more of what it drafts.

    It starts from a given smaller model (--small), from a copy with fewer layers (--layers), or from exits of the
    target (--exits). Checkpoints are written as it goes: stopped in the middle, the same command with --resume
    continues, with the same result.
    """
    with require_extra("runtime"):
        from hsdopt.runtime.alignment import Recipe
        from hsdopt.runtime.calibration import Calibration
    if labels not in ("argmax", "outputs"):
        raise InvalidArgumentError(f"expected argmax or outputs as --labels; got {labels!r}")
    request = _Request(
        target=absolute(target),
        small=None if small is None else absolute(small),
        layers=layers,
        exits=whole_numbers(exits, "exits"),
        own_layers=own_layers if freeze_target else None,
        head_tokens=head_tokens,
        train_embeddings=train_embeddings,
        drop_group=drop_group,
        choice_tokens=choice_tokens,
        holdout=holdout,
        recipe=Recipe(
            steps=steps,
            minutes=minutes,
            batch=batch,
            learning_rate=learning_rate,
            warmup=warmup,
            soft=soft,
            labels="argmax" if labels == "argmax" else "outputs",
            evaluate_every=evaluate_every,
            patience=patience,
            seed=seed,
        ),
        calibration=Calibration(
            samples=samples,
            temperature=temperature,
            spans=spans,
            max_new_tokens=max_new_tokens,
            batch=_TOGETHER,
            top=_TOP if soft else 0,
            seed=seed,
        ),
    )
    place = _Place(output_path, calibration, resume=resume, force=force)
    place.clear()
    loading = {"device": device, "threads": threads, "trust_remote_code": trust_remote_code}
    result = _align(request, place, _workload(prompts, max_prompts), loading, compact=compact)
    _show(result, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to be trained, and how: all that a resumed run must have alike."""

    target: str
    small: str | None
    layers: int | None
    exits: tuple[int, ...] | None
    own_layers: int | None
    head_tokens: int | None
    train_embeddings: bool | None
    drop_group: int
    choice_tokens: int
    holdout: float
    recipe: Recipe
    calibration: Calibration

    def __post_init__(self) -> None:
        given = [self.small, self.layers, self.exits]
        if all(option is None for option in given):
            raise InvalidArgumentError("expected a start: --small MODEL, --layers N or --exits N,N; got none")
        if self.exits is not None and (self.small is not None or self.layers is not None):
            raise InvalidArgumentError("expected --exits without --small and --layers: exits are the target's own")
        if self.own_layers is not None and self.exits is None:
            raise InvalidArgumentError("expected --exits with --freeze-target; got none")
        if self.joint and self.head_tokens is not None:
            raise InvalidArgumentError("expected --freeze-target with --head-tokens and --exits: the head is shared")

    @property
    def joint(self) -> bool:
        """Whether the target's copy is trained together with its exits."""
        return self.exits is not None and self.own_layers is None

    @property
    def embeddings(self) -> bool:
        """Whether embeddings are trained: those of a given model unless told, those of a copy if told."""
        if self.train_embeddings is None:
            return self.small is not None and self.layers is None
        return self.train_embeddings


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    data: Path | None
    resume: bool
    force: bool

    @property
    def partial(self) -> Path:
        """Where checkpoints are kept until the drafter is complete."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def journal(self) -> Path:
        """Where the options and the choice of layers are kept."""
        return self.partial / "run.jsonl"

    def clear(self) -> None:
        """Refuse to replace a finished drafter unless told; forget an unfinished one when told."""
        if self.force and self.resume:
            raise InvalidArgumentError("expected --resume or --force, not both: one continues, the other starts afresh")
        if self.path.exists() and not self.force:
            raise HsdoptError(f"{self.path} is there already; name another folder with -o, or replace it with --force")
        if self.force:
            shutil.rmtree(self.partial, ignore_errors=True)
        output_folder(self.partial)
        if self._untouched():
            self.journal.unlink(missing_ok=True)

    def _untouched(self) -> bool:
        """Whether a run before this one left options and nothing else, as after a mistake in them."""
        if not self.journal.exists() or any(self.partial.glob("checkpoint-*")):
            return False
        return self.journal.read_bytes().count(b"\n") <= 1

    def settle(self, made: Path) -> None:
        """Put the finished folder in its place; the checkpoints go only once that is done."""
        if self.path.exists():
            shutil.rmtree(self.path)
        made.replace(self.path)
        shutil.rmtree(self.partial, ignore_errors=True)


def _workload(prompts: str, count: int | None) -> Workload:
    with require_extra("runtime"):
        from hsdopt.profiling import load_workload
    workload = load_workload(prompts)
    return workload if count is None else workload.take(count)


def _align(
    request: _Request,
    place: _Place,
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
        students, start = _students(request, models, examples_, journal, report)
        outcome = train(
            students, examples_, held_out, request.recipe, folder=place.partial, resume=place.resume, progress=report
        )
        saved = _Saved(request, place, workload, models["target"], outcome, start, compact)
        return saved.write(students, dtype, examples_)


def _check(request: _Request, models: dict[str, Model], workload: Workload) -> None:
    """Refuse what cannot be trained before the target has written for hours."""
    from hsdopt.runtime.calibration import Example, split
    from hsdopt.runtime.quantised import decoder_layers
    from hsdopt.runtime.students import check_exits, check_layers, frequent_tokens

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

    from hsdopt.runtime.students import whole_head

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
    request: _Request,
    place: _Place,
    workload: Workload,
    target: Model,
    report: Progress,
) -> list[Example]:
    from hsdopt.profiling import render_prompts
    from hsdopt.profiling.journal import Journal
    from hsdopt.runtime.calibration import calibrate

    path = place.data or place.partial / "calibration.jsonl"
    output_folder(path.parent)
    header = {"target": request.target, "workload": workload.sha256, **asdict(request.calibration)}
    journal = Journal(path, header, resume=True)
    prompts = list(render_prompts(workload, target).values())
    return calibrate(target, prompts, request.calibration, journal=journal, progress=report)


def _students(
    request: _Request, models: dict[str, Model], examples: list[Example], journal: Journal, report: Progress
) -> tuple[Students, str]:
    """Return what is to be trained, and a sentence on where it starts."""
    from hsdopt.runtime.students import drafter, frequent_tokens, frozen_exits, joint_exits, shrink_head

    target = models["target"]
    network = models.get("small", target).network
    head = None
    if request.head_tokens is not None:
        head = frequent_tokens(examples, request.head_tokens, vocab_size=target.vocab_size, ends=target.eos)
    if request.exits is not None:
        if request.own_layers is None:
            return joint_exits(network, request.exits, embeddings=request.embeddings), _JOINT
        chosen = _some(examples, request.choice_tokens)
        made = frozen_exits(network, request.exits, own=request.own_layers, examples=chosen, head_tokens=head)
        return made, f"The target's lower layers, frozen; the last {request.own_layers} and the norm are its own."
    skipped, start = _skipped(request, network, examples, journal, report)
    students = drafter(network, skipped=skipped, embeddings=request.embeddings)
    if head is not None:
        shrink_head(students.parts[0].network, head)
        start += f" Its head is cut down to {len(head)} tokens."
    return students, start


def _skipped(
    request: _Request,
    network: PreTrainedModel,
    examples: list[Example],
    journal: Journal,
    report: Progress,
) -> tuple[tuple[int, ...], str]:
    """Return the layers to leave out of `network`, and a sentence on it."""
    from hsdopt.runtime.quantised import decoder_layers
    from hsdopt.runtime.students import choose_layers

    base = request.target if request.small is None else request.small
    if request.layers is None:
        return (), f"All layers of {base}."
    chosen = _some(examples, request.choice_tokens)
    skipped = choose_layers(
        network, chosen, layers=request.layers, group=request.drop_group, journal=journal, progress=report
    )
    count = decoder_layers(network)
    left = ", ".join(str(layer) for layer in range(count) if layer not in skipped)
    tokens = sum(example.outputs for example in chosen)
    return skipped, (
        f"{request.layers} of the {count} layers of {base}: {left}, left by dropping, one by one, those without which"
        f" the target's choice was met most often on {tokens} tokens."
    )


def _some(examples: list[Example], tokens: int) -> list[Example]:
    """Return greedy examples of about so many tokens, spread over the prompts."""
    greedy = [example for example in examples if example.kind == "greedy"]
    return greedy[:: max(1, sum(example.outputs for example in greedy) // tokens)]


@dataclass(frozen=True, slots=True)
class _Saved:
    """Writes what was trained."""

    request: _Request
    place: _Place
    workload: Workload
    target: Model
    outcome: Outcome
    start: str
    compact: bool

    def write(self, students: Students, dtype: torch.dtype | None, examples: list[Example]) -> dict[str, Any]:
        """Write the folder of every network, put them in their place, and return what is shown."""
        from hsdopt.runtime.drafters import save_drafter

        made = self.place.partial / "made"
        shutil.rmtree(made, ignore_errors=True)
        for name, network in students.networks().items():
            save_drafter(
                made / name if self._split else made,
                network,
                self.target.tokenizer,
                target=self.target.network,
                source=self.request.target,
                dtype=dtype,
                compact=self.compact,
                files=self._files(name, examples),
            )
        self.place.settle(made)
        return self._result(examples)

    @property
    def _split(self) -> bool:
        """Whether every exit has a folder of its own."""
        return self.request.exits is not None and not self.request.joint

    def _source(self, name: str) -> str:
        """Return what a student is loaded from."""
        path = self.place.path.absolute()
        if self.request.exits is None or name == "full":
            return str(path)
        return f"exit:{name.removeprefix('exit-')}@{path}" if self.request.joint else str(path / name)

    def _files(self, name: str, examples: list[Example]) -> dict[str, str | bytes]:
        from hsdopt.runtime.alignment import log_text
        from hsdopt.runtime.drafters import model_card

        data = (
            f"{len(examples)} outputs of {self.request.target} with {sum(e.outputs for e in examples)} tokens in all, "
            f"on prompts of {Path(self.workload.name).name} (sha256 {self.workload.sha256[:12]})."
        )
        card = model_card(
            [name] if self._split else list(self.outcome.after),
            self.outcome,
            target=self.request.target,
            source=self._source(name),
            start=self.start,
            data=data,
            recipe={**asdict(self.request.calibration), **asdict(self.request.recipe)},
        )
        return {"README.md": card, "log.csv": log_text(self.outcome.log), **_curve(self.outcome)}

    def _result(self, examples: list[Example]) -> dict[str, Any]:
        outcome = self.outcome
        drafters = [
            {
                "name": name,
                "source": self._source(name),
                "before": _rate(outcome.before[name]),
                "after": _rate(outcome.after[name]),
            }
            for name in outcome.after
        ]
        return {
            "folder": str(self.place.path),
            "drafters": drafters,
            "steps": outcome.steps,
            "best_step": outcome.best_step,
            "tokens": outcome.tokens,
            "seconds": outcome.seconds,
            "stopped": outcome.stopped,
            "sequences": len(examples),
        }


def _curve(outcome: Outcome) -> dict[str, bytes]:
    """Return the learning curve as files; none without matplotlib."""
    try:
        from matplotlib.figure import Figure

        from hsdopt import plots
    except ModuleNotFoundError:
        status().print("no learning curve: install hsdopt with its extra [plots]")
        return {}
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    plots.learning_curve(outcome.log, ax=figure.subplots())
    return {f"learning-curve.{suffix}": plots.render(figure, suffix) for suffix in ("png", "svg")}


def _rate(found: Agreement) -> dict[str, Any]:
    return {
        "acceptance": found.rate,
        "interval": [found.low, found.high],
        "accepted": found.accepted,
        "places": found.places,
    }


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print what was made, and how its acceptance changed."""
    if as_json:
        print_json(result)
        return
    table = new_table("drafter", "before", "after", "95 % interval", "places")
    for row in result["drafters"]:
        low, high = row["after"]["interval"]
        rates = (f"{row[when]['acceptance']:.3f}" for when in ("before", "after"))
        table.add_row(row["source"], *rates, f"{low:.3f} to {high:.3f}", str(row["after"]["places"]))
    typer.echo(
        f"{result['folder']}: {result['steps']} steps, {result['tokens']} tokens, {result['seconds']:.0f} s;"
        " acceptance on held-out prompts"
    )
    output().print(table)
